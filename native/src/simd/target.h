/* target.h - instruction sets that not every CPU has.
 *
 * Functions between KT_TARGET_BEGIN(set) and KT_TARGET_END are compiled for a set, those of
 * headers included there too. Other files reach them only through a table of levels (cpu.h),
 * which has asked the CPU. */
#ifndef KT_TARGET_H
#define KT_TARGET_H

/* POPCNT is older than AVX2; of GCC's "avx2" it is a part, of clang's it is not. */
#define KT_TARGET_AVX2 "avx2,f16c,fma,popcnt"
#define KT_TARGET_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2," KT_TARGET_AVX2
#define KT_TARGET_AVX512_VNNI "avx512vnni," KT_TARGET_AVX512
#define KT_TARGET_AVX512_BF16 "avx512bf16,avx512vbmi," KT_TARGET_AVX512_VNNI
#define KT_TARGET_AMX "amx-tile,amx-int8,amx-bf16,gfni," KT_TARGET_AVX512_BF16

#define KT_TARGET_PRAGMA(...) _Pragma(#__VA_ARGS__)
#define KT_TARGET_SETS(...) KT_TARGET_PRAGMA(__VA_ARGS__) /* of names of sets makes their text */

#if defined(__clang__)
#define KT_TARGET_BEGIN(set)                                                                       \
  KT_TARGET_SETS(                                                                                  \
      clang attribute push(__attribute__((target(KT_TARGET_##set))), apply_to = function))
#define KT_TARGET_END KT_TARGET_PRAGMA(clang attribute pop)
#else
#if defined(__SANITIZE_ADDRESS__) /* unrolled loops take minutes to instrument */
#define KT_TARGET_OPTIMIZE
#else
#define KT_TARGET_OPTIMIZE KT_TARGET_PRAGMA(GCC optimize("O3"))
#endif
#define KT_TARGET_BEGIN(set)                                                                       \
  KT_TARGET_PRAGMA(GCC push_options)                                                               \
  KT_TARGET_SETS(GCC target(KT_TARGET_##set)) KT_TARGET_OPTIMIZE
#define KT_TARGET_END KT_TARGET_PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Dtypes, row forms and table rows are constants of a loop only if all of it is inlined. */
#define KT_INLINE static inline __attribute__((always_inline))

#endif
