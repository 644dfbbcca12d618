/* fixed_avx512.h - integers of rows for fixed.h on AVX-512: 32 columns at a time. */
#ifndef KT_FIXED_AVX512_H
#define KT_FIXED_AVX512_H

#include "fixed.h"
#include "strip.h"

/* 16 magnitudes of binary32 as integers. */
KT_INLINE __m512i kt_fixed16_avx512(__m512i bits, __m512 factor) {
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  const __m512 w = _mm512_castsi512_ps(bits);
  return _mm512_cvt_roundps_epi32(_mm512_mul_round_ps(w, factor, NEAREST), NEAREST);
}

/* 32 columns; the packs put the halves of bf16 back in order. */
KT_INLINE __m512i kt_fixed32_avx512(const uint8_t *row, int64_t k, int form, __m512 factor) {
  __m512i low, high;
  if (form == KT_ROW_BF16) {
    const __m512i zero = _mm512_setzero_si512(), all = _mm512_loadu_si512(row + 2 * k);
    const __m512i magnitude = _mm512_and_si512(all, _mm512_set1_epi16(0x7fff));
    low = _mm512_unpacklo_epi16(zero, magnitude), high = _mm512_unpackhi_epi16(zero, magnitude);
  } else {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    low = _mm512_and_si512(_mm512_loadu_si512(row + 4 * k), mask);
    high = _mm512_and_si512(_mm512_loadu_si512(row + 4 * k + 64), mask);
  }
  return _mm512_packs_epi32(kt_fixed16_avx512(low, factor), kt_fixed16_avx512(high, factor));
}

/* The sum of words that may have 32 bits. */
KT_INLINE int64_t kt_fixed_total_avx512(__m512i sums) {
  const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sums));
  const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(sums, 1));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
}

KT_INLINE void kt_fixed_form_avx512(const uint8_t *row, int64_t cols, const int form, float factor,
                                    int16_t *to, const int measured, kt_fixed_moments *moments) {
  const __m512i one = _mm512_set1_epi16(1);
  const __m512 factors = _mm512_set1_ps(factor);
  kt_fixed_moments found = {0, 0};
  for (int64_t k = 0, end; k < cols; k = end) {
    __m512i sum = _mm512_setzero_si512(), square = sum;
    end = cols - k < KT_FIXED_BLOCK ? cols : k + KT_FIXED_BLOCK;
    for (int64_t at = k; at < end; at += 32) {
      const __m512i m = kt_fixed32_avx512(row, at, form, factors), part = _mm512_srli_epi16(m, 5);
      _mm512_storeu_si512(to + at, m);
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(m, one));
      square = _mm512_add_epi32(square, _mm512_madd_epi16(part, part));
    }
    found.sum += kt_fixed_total_avx512(sum);
    found.square += kt_fixed_total_avx512(square);
  }
  if (measured) *moments = found;
}

static inline void kt_fixed_row_avx512(const uint8_t *row, int64_t cols, int form, float factor,
                                       int16_t *to, kt_fixed_moments *moments) {
  if (form == KT_ROW_BF16 && moments)
    kt_fixed_form_avx512(row, cols, KT_ROW_BF16, factor, to, 1, moments);
  else if (form == KT_ROW_BF16)
    kt_fixed_form_avx512(row, cols, KT_ROW_BF16, factor, to, 0, NULL);
  else if (moments)
    kt_fixed_form_avx512(row, cols, KT_ROW_F32, factor, to, 1, moments);
  else
    kt_fixed_form_avx512(row, cols, KT_ROW_F32, factor, to, 0, NULL);
}

#endif
