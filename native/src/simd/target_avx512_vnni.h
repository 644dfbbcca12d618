/* target_avx512_vnni.h - as target_avx512.h, and VNNI: for products with integer weights. */
#ifndef KT_TARGET_AVX512_VNNI_H
#define KT_TARGET_AVX512_VNNI_H

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,bmi,bmi2"))),    \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,bmi,bmi2")
#if !defined(__SANITIZE_ADDRESS__) /* unrolled loops take minutes to instrument */
#pragma GCC optimize("O3")
#endif
#endif

#include <immintrin.h>

#define KT_INLINE static inline __attribute__((always_inline))

#endif
