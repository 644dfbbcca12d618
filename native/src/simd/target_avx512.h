/* target_avx512.h - include first in a file whose functions use AVX-512 F, BW, DQ, VL.
 * Only such files may call them, after kt_isa_dispatch() has said that the CPU can. */
#ifndef KT_TARGET_AVX512_H
#define KT_TARGET_AVX512_H

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))),          \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#if !defined(__SANITIZE_ADDRESS__) /* unrolled loops take minutes to instrument */
#pragma GCC optimize("O3")
#endif
#endif

#include <immintrin.h>

/* Dtypes, row forms and table rows are constants of a loop only if all of it is inlined. */
#define KT_INLINE static inline __attribute__((always_inline))

#endif
