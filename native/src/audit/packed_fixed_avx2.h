/* packed_fixed_avx2.h - weights as integers of packed_fixed.h with AVX2. Include after
 * KT_TARGET_BEGIN(AVX2).
 */
#ifndef KT_AUDIT_PACKED_FIXED_AVX2_H
#define KT_AUDIT_PACKED_FIXED_AVX2_H

#include "packed_fixed_sums.h"

#define KT_AUDIT_OWN_INTEGERS

INLINE int64_t total_of(__m256i sums) {
  const __m256i low = _mm256_cvtepu32_epi64(_mm256_castsi256_si128(sums));
  const __m256i four =
      _mm256_add_epi64(low, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(sums, 1)));
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
}

INLINE __m256i integers_of(__m256i bits, __m256 factor) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(bits), factor));
}

/* Bits of 16 columns, in any order. */
INLINE void magnitudes_of(const void *weights, int64_t c, const int halves, __m256i bits[2]) {
  if (halves) {
    const __m256i zero = _mm256_setzero_si256();
    const void *const from = (const uint16_t *)weights + c;
    const __m256i all = _mm256_loadu_si256((const __m256i *)from);
    const __m256i positive = _mm256_andnot_si256(_mm256_set1_epi16(INT16_MIN), all);
    bits[0] = _mm256_unpacklo_epi16(zero, positive);
    bits[1] = _mm256_unpackhi_epi16(zero, positive);
    return;
  }
  const __m256 sign = _mm256_set1_ps(-0.0f);
  const __m256 low = _mm256_loadu_ps((const float *)weights + c);
  const __m256 high = _mm256_loadu_ps((const float *)weights + c + 8);
  bits[0] = _mm256_castps_si256(_mm256_andnot_ps(sign, low));
  bits[1] = _mm256_castps_si256(_mm256_andnot_ps(sign, high));
}

/* 4096 columns at most. */
INLINE void add_weights(const void *w, int64_t cols, const int halves, float factor, int16_t *to,
                        const int measured, moments *of) {
  const __m256 factors = _mm256_set1_ps(factor);
  __m256i ones = _mm256_setzero_si256(), squares = ones;
  for (int64_t c = 0; c < cols; c += 16) {
    __m256i bits[2];
    magnitudes_of(w, c, halves, bits);
    const __m256i low = integers_of(bits[0], factors), high = integers_of(bits[1], factors);
    const __m256i m = _mm256_packs_epi32(low, high), part = _mm256_srli_epi16(m, 5);
    _mm256_storeu_si256((__m256i *)(void *)(to + c), m);
    ones = _mm256_add_epi32(ones, _mm256_add_epi32(low, high));
    squares = _mm256_add_epi32(squares, _mm256_madd_epi16(part, part));
  }
  if (!measured) return;
  of->ones += total_of(ones);
  of->squares += total_of(squares);
}

#endif
