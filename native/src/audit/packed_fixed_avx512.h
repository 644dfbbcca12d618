/* packed_fixed_avx512.h - weights as integers of packed_fixed.h with AVX-512. Include after
 * KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_PACKED_FIXED_AVX512_H
#define KT_AUDIT_PACKED_FIXED_AVX512_H

#include "packed_fixed_sums.h"

#define KT_AUDIT_OWN_INTEGERS

INLINE int64_t total_of(__m512i sums) {
  const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sums));
  const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(sums, 1));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
}

INLINE __m512i integers_of(__m512i bits, __m512 factor) {
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  return _mm512_cvt_roundps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), factor), NEAREST);
}

/* Bits of 32 columns, in any order. */
INLINE void magnitudes_of(const void *weights, int64_t c, const int halves, __m512i bits[2]) {
  if (halves) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i all = _mm512_loadu_si512((const uint16_t *)weights + c);
    const __m512i positive = _mm512_andnot_si512(_mm512_set1_epi16(INT16_MIN), all);
    bits[0] = _mm512_unpacklo_epi16(zero, positive);
    bits[1] = _mm512_unpackhi_epi16(zero, positive);
    return;
  }
  bits[0] = _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps((const float *)weights + c)));
  bits[1] = _mm512_castps_si512(_mm512_abs_ps(_mm512_loadu_ps((const float *)weights + c + 16)));
}

/* 4096 columns at most. */
INLINE void add_weights(const void *w, int64_t cols, const int halves, float factor, int16_t *to,
                        const int measured, moments *of) {
  const __m512 factors = _mm512_set1_ps(factor);
  __m512i ones = _mm512_setzero_si512(), squares = ones;
  for (int64_t c = 0; c < cols; c += 32) {
    __m512i bits[2];
    magnitudes_of(w, c, halves, bits);
    const __m512i low = integers_of(bits[0], factors), high = integers_of(bits[1], factors);
    const __m512i m = _mm512_packs_epi32(low, high), part = _mm512_srli_epi16(m, 5);
    _mm512_storeu_si512(to + c, m);
    ones = _mm512_add_epi32(ones, _mm512_add_epi32(low, high));
    squares = _mm512_add_epi32(squares, _mm512_madd_epi16(part, part));
  }
  if (!measured) return;
  of->ones += total_of(ones);
  of->squares += total_of(squares);
}

#endif
