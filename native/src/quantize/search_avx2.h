/* search_avx2.h - the loops of search.h on AVX2, which need not have fused products: 8 of the 16
 * lanes of sums at a time, and 4 scales, as many as registers hold. */
#ifndef KT_SEARCH_AVX2_H
#define KT_SEARCH_AVX2_H

#include "../simd/unroll.h"
#include "search.h"
#include "strip.h"

KT_INLINE void kt_magnitudes_avx2(const uint8_t *row, int64_t cols, int form, float *to) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int64_t k = 0; k < cols; k += 8) {
    __m256i bits;
    if (form == KT_ROW_BF16) {
      const __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)(row + 2 * k));
      bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    } else {
      bits = _mm256_loadu_si256((const __m256i *)(const void *)(row + 4 * k));
    }
    _mm256_storeu_si256((__m256i *)(void *)(to + k), _mm256_and_si256(bits, magnitude));
  }
}

/* Adds 8 binary32 sums to binary64 ones. */
KT_INLINE void kt_widen_sums_avx2(__m256 sums, double *to) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(sums));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(sums, 1));
  _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), low));
  _mm256_storeu_pd(to + 4, _mm256_add_pd(_mm256_loadu_pd(to + 4), high));
}

/* As memset, whose start takes longer than all of it. */
KT_INLINE void kt_clear_lanes_avx2(kt_lane_sums *lanes, const int count) {
  for (int i = 0; i < count; i++) KT_UNROLL(4) for (int l = 0; l < KT_SEARCH_LANES; l += 4) {
      _mm256_storeu_pd(lanes[i].product + l, _mm256_setzero_pd());
      _mm256_storeu_pd(lanes[i].square + l, _mm256_setzero_pd());
    }
}

/* Columns `begin` to `end` of a block, of the 8 lanes from `lane` on. */
KT_INLINE void kt_add_block_avx2(const kt_search_row *row, const float *inverse, int64_t begin,
                                 int64_t end, const int lane, const int count, const int weighted,
                                 kt_lane_sums *lanes) {
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC, MOST = 4 };
  const __m256 top = _mm256_set1_ps(row->top);
  __m256 product[MOST], square[MOST];
  KT_UNROLL(4) for (int i = 0; i < count; i++) product[i] = square[i] = _mm256_setzero_ps();
  for (int64_t k = begin + lane; k < end; k += KT_SEARCH_LANES) {
    const __m256 w = _mm256_loadu_ps(row->magnitude + k);
    const __m256 v = weighted ? _mm256_loadu_ps(row->importance + k) : w;
    const __m256 vw = weighted ? _mm256_mul_ps(v, w) : w;
    KT_UNROLL(4) for (int i = 0; i < count; i++) {
      const __m256 y = _mm256_mul_ps(w, _mm256_broadcast_ss(inverse + i));
      const __m256 c = _mm256_round_ps(_mm256_min_ps(y, top), NEAREST);
      const __m256 cc = _mm256_mul_ps(c, c);
      product[i] = _mm256_add_ps(product[i], _mm256_mul_ps(vw, c));
      square[i] = _mm256_add_ps(square[i], weighted ? _mm256_mul_ps(v, cc) : cc);
    }
  }
  KT_UNROLL(4) for (int i = 0; i < count; i++) {
    kt_widen_sums_avx2(product[i], lanes[i].product + lane);
    kt_widen_sums_avx2(square[i], lanes[i].square + lane);
  }
}

KT_INLINE void kt_sum_row_avx2(const kt_search_row *row, const float *inverse, const int count,
                               const int weighted, kt_code_sums *sums) {
  kt_lane_sums lanes[4];
  kt_clear_lanes_avx2(lanes, count);
  for (int64_t begin = 0, end; begin < row->cols; begin = end) {
    end = begin + KT_SEARCH_BLOCK < row->cols ? begin + KT_SEARCH_BLOCK : row->cols;
    kt_add_block_avx2(row, inverse, begin, end, 0, count, weighted, lanes);
    kt_add_block_avx2(row, inverse, begin, end, 8, count, weighted, lanes);
  }
  kt_add_lanes(lanes, count, sums);
}

#define KT_SUM_ROWS(count)                                                                         \
  KT_NOINLINE void kt_sum_##count##_avx2(const kt_search_row *row, const float *inverse,           \
                                         kt_code_sums *sums) {                                     \
    if (row->importance)                                                                           \
      kt_sum_row_avx2(row, inverse, count, 1, sums);                                               \
    else                                                                                           \
      kt_sum_row_avx2(row, inverse, count, 0, sums);                                               \
  }

KT_SUM_ROWS(1)
KT_SUM_ROWS(4)
#undef KT_SUM_ROWS

static inline void kt_code_sums_avx2(const kt_search_row *row, const float *inverse, int count,
                                     kt_code_sums *sums) {
  int done = 0;
  for (; done + 4 <= count; done += 4) kt_sum_4_avx2(row, inverse + done, sums + done);
  for (; done < count; done++) kt_sum_1_avx2(row, inverse + done, sums + done);
}

#endif
