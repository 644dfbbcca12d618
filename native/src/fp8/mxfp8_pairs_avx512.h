/* mxfp8_pairs_avx512.h - lines of two rows in turn times their scales of MXFP8. Include after
 * KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_MXFP8_PAIRS_AVX512_H
#define KT_MXFP8_PAIRS_AVX512_H

#include "../gemm/powers_avx512.h"
#include "../simd/bits.h"
#include "fp8.h"

/* Scales of 32 rows: whether bf16 holds all products; pairs [16 * 32 bits], 64-byte aligned: what
 * they add to bf16 bits then. */
KT_INLINE int kt_mxfp8_take_scales(const uint8_t *scale, void *pairs) {
  _mm512_store_si512(pairs, kt_power_pairs(scale));
  return kt_powers_within(scale, KT_STRIP, KT_MXFP8_EXACT_FIRST, KT_MXFP8_EXACT_LAST);
}

KT_INLINE __m512 kt_mxfp8_power(uint8_t code) {
  return _mm512_set1_ps(kt_float(code ? (uint32_t)code << 23 : 0x00400000u));
}

/* Products that bf16 does not hold become 0 or infinity. */
KT_NOINLINE __m512i kt_mxfp8_wide_line(__m512i line, const uint8_t scale[2]) {
  const __m512i upper = _mm512_and_si512(line, _mm512_set1_epi32((int)0xffff0000));
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  const __m512 odd = _mm512_castsi512_ps(upper);
  const __m256bh low = _mm512_cvtneps_pbh(_mm512_mul_ps(even, kt_mxfp8_power(scale[0])));
  const __m256bh high = _mm512_cvtneps_pbh(_mm512_mul_ps(odd, kt_mxfp8_power(scale[1])));
  return _mm512_or_si512(_mm512_cvtepu16_epi32((__m256i)low),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)high), 16));
}

/* A line of rows 2i and 2i + 1. */
KT_INLINE __m512i kt_mxfp8_scaled_line(int exact, const uint8_t *scale, const void *pairs, int i,
                                       __m512i line) {
  int32_t pair;
  if (!exact) return kt_mxfp8_wide_line(line, scale + 2 * i);
  __builtin_memcpy(&pair, (const uint8_t *)pairs + 4 * i, sizeof pair);
  return kt_times_powers(line, _mm512_set1_epi32(pair));
}

#endif
