/* fixed_avx2.h - integers of rows for fixed.h on AVX2: 16 columns at a time. */
#ifndef KT_FIXED_AVX2_H
#define KT_FIXED_AVX2_H

#include "fixed.h"
#include "strip.h"

/* 8 magnitudes of binary32 as integers. */
KT_INLINE __m256i kt_fixed8_avx2(__m256i bits, __m256 factor) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(bits), factor));
}

/* 16 columns; the packs put the halves of bf16 back in order. */
KT_INLINE __m256i kt_fixed16_avx2(const uint8_t *row, int64_t k, int form, __m256 factor) {
  const __m256i *const at =
      (const __m256i *)(const void *)(row + (form == KT_ROW_BF16 ? 2 : 4) * k);
  __m256i low, high;
  if (form == KT_ROW_BF16) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i magnitude = _mm256_and_si256(_mm256_loadu_si256(at), _mm256_set1_epi16(0x7fff));
    low = _mm256_unpacklo_epi16(zero, magnitude), high = _mm256_unpackhi_epi16(zero, magnitude);
  } else {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    low = _mm256_and_si256(_mm256_loadu_si256(at), mask);
    high = _mm256_and_si256(_mm256_loadu_si256(at + 1), mask);
  }
  return _mm256_packs_epi32(kt_fixed8_avx2(low, factor), kt_fixed8_avx2(high, factor));
}

/* The sum of words that may have 32 bits. */
KT_INLINE int64_t kt_fixed_total_avx2(__m256i sums) {
  const __m256i low = _mm256_cvtepu32_epi64(_mm256_castsi256_si128(sums));
  const __m256i high = _mm256_cvtepu32_epi64(_mm256_extracti128_si256(sums, 1));
  int64_t four[4];
  _mm256_storeu_si256((__m256i *)(void *)four, _mm256_add_epi64(low, high));
  return four[0] + four[1] + four[2] + four[3];
}

KT_INLINE void kt_fixed_form_avx2(const uint8_t *row, int64_t cols, const int form, float factor,
                                  int16_t *to, const int measured, kt_fixed_moments *moments) {
  const __m256i one = _mm256_set1_epi16(1);
  const __m256 factors = _mm256_set1_ps(factor);
  kt_fixed_moments found = {0, 0};
  for (int64_t k = 0, end; k < cols; k = end) {
    __m256i sum = _mm256_setzero_si256(), square = sum;
    end = cols - k < KT_FIXED_BLOCK ? cols : k + KT_FIXED_BLOCK;
    for (int64_t at = k; at < end; at += 16) {
      const __m256i m = kt_fixed16_avx2(row, at, form, factors), part = _mm256_srli_epi16(m, 5);
      _mm256_storeu_si256((__m256i *)(void *)(to + at), m);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(m, one));
      square = _mm256_add_epi32(square, _mm256_madd_epi16(part, part));
    }
    found.sum += kt_fixed_total_avx2(sum);
    found.square += kt_fixed_total_avx2(square);
  }
  if (measured) *moments = found;
}

static inline void kt_fixed_row_avx2(const uint8_t *row, int64_t cols, int form, float factor,
                                     int16_t *to, kt_fixed_moments *moments) {
  if (form == KT_ROW_BF16 && moments)
    kt_fixed_form_avx2(row, cols, KT_ROW_BF16, factor, to, 1, moments);
  else if (form == KT_ROW_BF16)
    kt_fixed_form_avx2(row, cols, KT_ROW_BF16, factor, to, 0, NULL);
  else if (moments)
    kt_fixed_form_avx2(row, cols, KT_ROW_F32, factor, to, 1, moments);
  else
    kt_fixed_form_avx2(row, cols, KT_ROW_F32, factor, to, 0, NULL);
}

#endif
