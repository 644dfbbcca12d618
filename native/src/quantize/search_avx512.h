/* search_avx512.h - the loops of search.h on AVX-512: 16 columns are the 16 lanes of sums. */
#ifndef KT_SEARCH_AVX512_H
#define KT_SEARCH_AVX512_H

#include "../simd/unroll.h"
#include "search.h"
#include "strip.h"

KT_INLINE void kt_magnitudes_avx512(const uint8_t *row, int64_t cols, int form, float *to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t k = 0; k < cols; k += 16) {
    __m512i bits;
    if (form == KT_ROW_BF16) {
      const __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * k));
      bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
    } else {
      bits = _mm512_loadu_si512(row + 4 * k);
    }
    _mm512_storeu_si512(to + k, _mm512_and_si512(bits, magnitude));
  }
}

/* Adds 16 binary32 sums to binary64 ones. */
KT_INLINE void kt_widen_sums_avx512(__m512 sums, double *to) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(sums));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(sums, 1));
  _mm512_storeu_pd(to, _mm512_add_pd(_mm512_loadu_pd(to), low));
  _mm512_storeu_pd(to + 8, _mm512_add_pd(_mm512_loadu_pd(to + 8), high));
}

/* As memset, whose start takes longer than all of it. */
KT_INLINE void kt_clear_lanes_avx512(kt_lane_sums *lanes, const int count) {
  for (int i = 0; i < count; i++) KT_UNROLL(2) for (int l = 0; l < KT_SEARCH_LANES; l += 8) {
      _mm512_storeu_pd(lanes[i].product + l, _mm512_setzero_pd());
      _mm512_storeu_pd(lanes[i].square + l, _mm512_setzero_pd());
    }
}

/* Columns `begin` to `end` of a block. c * c and, without importance, its sums are exact: fused or
 * not is the same. */
KT_INLINE void kt_add_block_avx512(const kt_search_row *row, const float *inverse, int64_t begin,
                                   int64_t end, const int count, const int exact,
                                   const int weighted, kt_lane_sums *lanes) {
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  const __m512 top = _mm512_set1_ps(row->top);
  __m512 product[KT_SEARCH_AT_ONCE], square[KT_SEARCH_AT_ONCE];
  KT_UNROLL(8) for (int i = 0; i < count; i++) product[i] = square[i] = _mm512_setzero_ps();
  for (int64_t k = begin; k < end; k += KT_SEARCH_LANES) {
    const __m512 w = _mm512_loadu_ps(row->magnitude + k);
    const __m512 v = weighted ? _mm512_loadu_ps(row->importance + k) : w;
    const __m512 vw = weighted ? _mm512_mul_ps(v, w) : w;
    KT_UNROLL(8) for (int i = 0; i < count; i++) {
      const __m512 y = _mm512_mul_ps(w, _mm512_set1_ps(inverse[i]));
      const __m512 c = _mm512_roundscale_ps(_mm512_min_ps(y, top), NEAREST);
      product[i] = exact && !weighted ? _mm512_fmadd_ps(w, c, product[i])
                                      : _mm512_add_ps(product[i], _mm512_mul_ps(vw, c));
      square[i] = weighted ? _mm512_add_ps(square[i], _mm512_mul_ps(v, _mm512_mul_ps(c, c)))
                           : _mm512_fmadd_ps(c, c, square[i]);
    }
  }
  KT_UNROLL(8) for (int i = 0; i < count; i++) {
    kt_widen_sums_avx512(product[i], lanes[i].product);
    kt_widen_sums_avx512(square[i], lanes[i].square);
  }
}

KT_INLINE void kt_sum_row_avx512(const kt_search_row *row, const float *inverse, const int count,
                                 const int exact, const int weighted, kt_code_sums *sums) {
  kt_lane_sums lanes[KT_SEARCH_AT_ONCE];
  kt_clear_lanes_avx512(lanes, count);
  for (int64_t begin = 0, end; begin < row->cols; begin = end) {
    end = begin + KT_SEARCH_BLOCK < row->cols ? begin + KT_SEARCH_BLOCK : row->cols;
    kt_add_block_avx512(row, inverse, begin, end, count, exact, weighted, lanes);
  }
  kt_add_lanes(lanes, count, sums);
}

#define KT_SUM_ROWS(count)                                                                         \
  KT_NOINLINE void kt_sum_##count##_avx512(const kt_search_row *row, const float *inverse,         \
                                           kt_code_sums *sums) {                                   \
    if (row->importance)                                                                           \
      kt_sum_row_avx512(row, inverse, count, 0, 1, sums);                                          \
    else if (row->exact)                                                                           \
      kt_sum_row_avx512(row, inverse, count, 1, 0, sums);                                          \
    else                                                                                           \
      kt_sum_row_avx512(row, inverse, count, 0, 0, sums);                                          \
  }

KT_SUM_ROWS(1)
KT_SUM_ROWS(4)
KT_SUM_ROWS(8)
#undef KT_SUM_ROWS

static inline void kt_code_sums_avx512(const kt_search_row *row, const float *inverse, int count,
                                       kt_code_sums *sums) {
  if (count == KT_SEARCH_AT_ONCE)
    kt_sum_8_avx512(row, inverse, sums);
  else if (count == 4)
    kt_sum_4_avx512(row, inverse, sums);
  else
    kt_sum_1_avx512(row, inverse, sums);
}

#endif
