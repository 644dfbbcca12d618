/* target_avx512_bf16.h - as target_avx512.h, and VNNI, BF16, VBMI: for products with bf16 weights.
 */
#ifndef KT_TARGET_AVX512_BF16_H
#define KT_TARGET_AVX512_BF16_H

#if defined(__clang__)
#pragma clang attribute push(                                                                       \
    __attribute__((target(                                                                          \
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,bmi,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target(                                                                                \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,bmi,bmi2")
#if !defined(__SANITIZE_ADDRESS__) /* unrolled loops take minutes to instrument */
#pragma GCC optimize("O3")
#endif
#endif

#include <immintrin.h>

#define KT_INLINE static inline __attribute__((always_inline))

#endif
