/* packed_runs_avx2.h - what `compare_runs` of packed_loop.h does, with AVX2 and fewer operations:
 * the same bits of sums in the same lanes. Include after KT_TARGET_BEGIN(AVX2). */
#ifndef KT_AUDIT_PACKED_RUNS_AVX2_H
#define KT_AUDIT_PACKED_RUNS_AVX2_H

#include "packed_sums.h"

#define KT_AUDIT_QUICK_RUNS

/* 4 sums + 4 numbers, from memory: halves of a register would have to be moved first. */
INLINE __m256d plus(__m256d sums, const float *x) {
  return _mm256_add_pd(sums, _mm256_cvtps_pd(_mm_loadu_ps(x)));
}

/* Of 8 lanes: 4 of 64 columns, or 2 of 32. */
INLINE __m256 square_sums(const __m256 *x, const int cols) {
  const __m256 sum = _mm256_add_ps(_mm256_mul_ps(x[0], x[0]), _mm256_mul_ps(x[1], x[1]));
  if (cols == 2 * LANES) return sum;
  const __m256 more = _mm256_add_ps(_mm256_mul_ps(x[2], x[2]), _mm256_mul_ps(x[3], x[3]));
  return _mm256_add_ps(sum, more);
}

INLINE __m256 most_sizes(__m256 most, const __m256 *x, const int cols) {
  for (int i = 0; i < cols / LANES; i++)
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x[i]));
  return most;
}

/* Of codes: sums of squares, in 16 bits of INT4 and in 32 of INT8, the bits that are set in their
 * sizes, and how many are 0. */
typedef struct code_counts {
  __m256i squares, bits;
  int64_t zeros;
} code_counts;

INLINE void count_codes(const int8_t *codes, const int is_nibble, const int cols,
                        code_counts *counts) {
  for (int c = 0; c < cols; c += 32) {
    const __m256i all = _mm256_loadu_si256((const __m256i *)(const void *)(codes + c));
    const __m256i size = _mm256_abs_epi8(all), two = _mm256_maddubs_epi16(size, size);
    const __m256i zero = _mm256_cmpeq_epi8(all, _mm256_setzero_si256());
    counts->squares =
        is_nibble ? _mm256_add_epi16(counts->squares, two)
                  : _mm256_add_epi32(counts->squares, _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
    counts->bits = _mm256_or_si256(counts->bits, size);
    counts->zeros += __builtin_popcount((unsigned)_mm256_movemask_epi8(zero));
  }
}

/* The sum of words. */
INLINE int32_t words_of(__m256i x) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

/* Adds the squares of `runs`, unless a sum is not finite: then it returns 0. */
INLINE int add_squares(const float (*squared)[LANES], int64_t runs, double *to) {
  __m256d sum[LANES / 4];
  for (int i = 0; i < LANES / 4; i++) sum[i] = _mm256_loadu_pd(to + 4 * i);
  for (int64_t run = 0; run < runs; run++)
    for (int i = 0; i < LANES / 4; i++) sum[i] = plus(sum[i], squared[run] + 4 * i);
  const __m256d all = _mm256_add_pd(_mm256_add_pd(sum[0], sum[1]), _mm256_add_pd(sum[2], sum[3]));
  const __m256d zero = _mm256_setzero_pd(), none = _mm256_mul_pd(all, zero);
  for (int i = 0; i < LANES / 4; i++) _mm256_storeu_pd(to + 4 * i, sum[i]);
  return _mm256_movemask_pd(_mm256_cmp_pd(none, zero, _CMP_EQ_OQ)) == 15;
}

/* Adds `runs` times `cols` columns of a row, unless a code is `invalid`, or a sum is not finite:
 * then it returns 0 and has changed nothing. That many columns fit into KT_AUDIT_BLOCK. */
INLINE int quick_runs(const float *w, const int8_t *codes, float step, float limit, const int cut,
                      const int8_t invalid, const int cols, int64_t runs, row_state *row) {
  enum { MOST_RUNS = KT_AUDIT_BLOCK / KT_AUDIT_GROUP_COLS };
  const int is_nibble = invalid == -8;
  group_state *const group = &row->group;
  const __m256 steps = _mm256_set1_ps(step), least = _mm256_set1_ps(-limit);
  const __m256 most = _mm256_set1_ps(limit);
  _Alignas(32) float squared[2][MOST_RUNS][LANES];
  double source[LANES], error[LANES];
  __m256 most_source[2], most_error[2];
  code_counts counts = {_mm256_setzero_si256(), _mm256_setzero_si256(), 0};
  for (int half = 0; half < 2; half++) {
    most_source[half] = _mm256_loadu_ps(group->most_source + 8 * half);
    most_error[half] = _mm256_loadu_ps(group->most_error + 8 * half);
  }
  for (int64_t run = 0; run < runs; run++, w += cols, codes += cols) {
    for (int half = 0; half < 2; half++) {
      __m256 x[4], e[4], near[4];
      for (int i = 0; i < cols / LANES; i++) {
        const int at = i * LANES + 8 * half;
        const __m128i here = _mm_loadl_epi64((const __m128i *)(const void *)(codes + at));
        const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(here)), steps);
        x[i] = _mm256_loadu_ps(w + at);
        e[i] = _mm256_sub_ps(x[i], value);
        if (cut) near[i] = _mm256_sub_ps(_mm256_max_ps(_mm256_min_ps(x[i], most), least), value);
      }
      _mm256_store_ps(squared[0][run] + 8 * half, square_sums(x, cols));
      _mm256_store_ps(squared[1][run] + 8 * half, square_sums(e, cols));
      most_source[half] = most_sizes(most_source[half], x, cols);
      most_error[half] = most_sizes(most_error[half], cut ? near : e, cols);
    }
    count_codes(codes, is_nibble, cols, &counts);
  }
  const __m256i outside = _mm256_set1_epi8(is_nibble ? 8 : -128);
  if (!_mm256_testz_si256(counts.bits, outside)) return 0;
  memcpy(source, row->source, sizeof source);
  memcpy(error, row->error, sizeof error);
  if (!add_squares(squared[0], runs, source) || !add_squares(squared[1], runs, error)) return 0;
  memcpy(row->source, source, sizeof source);
  memcpy(row->error, error, sizeof error);
  for (int half = 0; half < 2; half++) {
    _mm256_storeu_ps(group->most_source + 8 * half, most_source[half]);
    _mm256_storeu_ps(group->most_error + 8 * half, most_error[half]);
  }
  if (is_nibble) counts.squares = _mm256_madd_epi16(counts.squares, _mm256_set1_epi16(1));
  group->squares += words_of(counts.squares); /* of KT_AUDIT_BLOCK codes at most */
  group->zeros += counts.zeros;
  return 1;
}

#endif
