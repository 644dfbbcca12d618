/* packed_runs_avx512.h - `compare_runs` of packed_loop.h with AVX-512: the same operations in the
 * same lanes, which the compiler does one by one. Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_PACKED_RUNS_AVX512_H
#define KT_AUDIT_PACKED_RUNS_AVX512_H

#include "packed_sums.h"

#define KT_AUDIT_OWN_RUNS

/* 16 sums in binary64. */
typedef struct double_sums {
  __m512d low, high;
} double_sums;

INLINE double_sums load_sums(const double *from) {
  return (double_sums){_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)};
}

INLINE void store_sums(double_sums sums, double *to) {
  _mm512_storeu_pd(to, sums.low);
  _mm512_storeu_pd(to + 8, sums.high);
}

INLINE double_sums plus(double_sums sums, __m512 x) {
  const __m256 high = _mm512_extractf32x8_ps(x, 1);
  return (double_sums){
      _mm512_add_pd(sums.low, _mm512_cvtps_pd(_mm512_castps512_ps256(x))),
      _mm512_add_pd(sums.high, _mm512_cvtps_pd(high)),
  };
}

INLINE __m512 square(__m512 x) { return _mm512_mul_ps(x, x); }

/* Of one lane: 4 of 64 columns, or 2 of 32. */
INLINE __m512 square_sums(const __m512 *x, const int cols) {
  const __m512 sum = _mm512_add_ps(square(x[0]), square(x[1]));
  if (cols == 2 * LANES) return sum;
  return _mm512_add_ps(sum, _mm512_add_ps(square(x[2]), square(x[3])));
}

/* The larger one, the second where one is a NaN. */
INLINE __m512 larger_of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }

INLINE __m512 most_of(const __m512 *x, const int cols) {
  const __m512 most = larger_of(_mm512_abs_ps(x[0]), _mm512_abs_ps(x[1]));
  if (cols == 2 * LANES) return most;
  return larger_of(most, larger_of(_mm512_abs_ps(x[2]), _mm512_abs_ps(x[3])));
}

/* Squares of 32 codes, two in a lane. */
INLINE __m512i squared_codes(__m256i codes) {
  const __m512i wide = _mm512_cvtepi8_epi16(codes);
  return _mm512_madd_epi16(wide, wide);
}

INLINE int64_t count_equal(__m512i codes, __m512i code, const int cols) {
  const __mmask64 there = cols == KT_AUDIT_COLS ? ~(__mmask64)0 : 0xffffffffu;
  return __builtin_popcountll(_mm512_mask_cmpeq_epi8_mask(there, codes, code));
}

INLINE void compare_runs(const float *w, const int8_t *codes, float step, float limit,
                         const int cut, const int8_t invalid, const int cols, int64_t runs,
                         row_state *row) {
  group_state *const group = &row->group;
  const __m512 steps = _mm512_set1_ps(step), most = _mm512_set1_ps(limit);
  const __m512 least_of = _mm512_set1_ps(-limit);
  double_sums source = load_sums(row->source), error = load_sums(row->error);
  __m512 most_source = _mm512_loadu_ps(group->most_source);
  __m512 most_error = _mm512_loadu_ps(group->most_error);
  __m512i squares = _mm512_setzero_si512();
  int64_t zeros = 0, beyond = 0;
  for (int64_t run = 0; run < runs; run++, w += cols, codes += cols) {
    __m512 x[4], e[4], near[4];
    for (int i = 0; i < cols / LANES; i++) {
      const __m128i here = _mm_loadu_si128((const __m128i *)(const void *)(codes + i * LANES));
      const __m512 level = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(here));
      const __m512 value = _mm512_mul_ps(level, steps);
      x[i] = _mm512_loadu_ps(w + i * LANES);
      e[i] = _mm512_sub_ps(x[i], value);
      if (cut) near[i] = _mm512_sub_ps(_mm512_max_ps(least_of, _mm512_min_ps(most, x[i])), value);
    }
    source = plus(source, square_sums(x, cols));
    error = plus(error, square_sums(e, cols));
    most_source = larger_of(most_of(x, cols), most_source);
    most_error = larger_of(most_of(cut ? near : e, cols), most_error);
    const __m256i first = _mm256_loadu_si256((const __m256i *)(const void *)codes);
    __m512i all = _mm512_castsi256_si512(first);
    squares = _mm512_add_epi32(squares, squared_codes(first));
    if (cols == KT_AUDIT_COLS) {
      const __m256i second = _mm256_loadu_si256((const __m256i *)(const void *)(codes + 32));
      all = _mm512_inserti64x4(all, second, 1);
      squares = _mm512_add_epi32(squares, squared_codes(second));
    }
    zeros += count_equal(all, _mm512_setzero_si512(), cols);
    if (invalid) beyond += count_equal(all, _mm512_set1_epi8(invalid), cols);
  }
  store_sums(source, row->source);
  store_sums(error, row->error);
  _mm512_storeu_ps(group->most_source, most_source);
  _mm512_storeu_ps(group->most_error, most_error);
  group->squares += _mm512_reduce_add_epi32(squares); /* of KT_AUDIT_BLOCK codes at most */
  group->zeros += zeros;
  group->invalid += beyond;
}

#endif
