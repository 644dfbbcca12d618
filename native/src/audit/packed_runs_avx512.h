/* packed_runs_avx512.h - what `compare_runs` of packed_loop.h does, with AVX-512 and fewer
 * operations: the same bits of sums in the same lanes. Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_PACKED_RUNS_AVX512_H
#define KT_AUDIT_PACKED_RUNS_AVX512_H

#include "packed_sums.h"

#define KT_AUDIT_QUICK_RUNS

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

/* From memory: halves of a register would have to be moved first. */
INLINE double_sums plus(double_sums sums, const float *x) {
  return (double_sums){
      _mm512_add_pd(sums.low, _mm512_cvtps_pd(_mm256_loadu_ps(x))),
      _mm512_add_pd(sums.high, _mm512_cvtps_pd(_mm256_loadu_ps(x + 8))),
  };
}

INLINE int are_finite(double_sums a, double_sums b) {
  const __m512d all = _mm512_add_pd(_mm512_add_pd(a.low, a.high), _mm512_add_pd(b.low, b.high));
  return _mm512_fpclass_pd_mask(all, 0x99) == 0; /* of no NaN, +inf or -inf */
}

INLINE __m512 square(__m512 x) { return _mm512_mul_ps(x, x); }

/* Of one lane: 4 of 64 columns, or 2 of 32. */
INLINE __m512 square_sums(const __m512 *x, const int cols) {
  const __m512 sum = _mm512_add_ps(square(x[0]), square(x[1]));
  if (cols == 2 * LANES) return sum;
  return _mm512_add_ps(sum, _mm512_add_ps(square(x[2]), square(x[3])));
}

/* The larger magnitude. */
INLINE __m512 larger_of(__m512 a, __m512 b) { return _mm512_range_ps(a, b, 0xb); }

INLINE __m512 most_sizes(__m512 most, const __m512 *x, const int cols) {
  most = larger_of(most, larger_of(x[0], x[1]));
  return cols == 2 * LANES ? most : larger_of(most, larger_of(x[2], x[3]));
}

/* The smaller magnitude with the sign of x. */
INLINE __m512 within_of(__m512 x, __m512 limit) { return _mm512_range_ps(x, limit, 0x2); }

/* Codes of one lane, 64 bytes or the lower 32. */
INLINE __m512i codes_of(const int8_t *codes, const int cols) {
  if (cols == KT_AUDIT_COLS) return _mm512_loadu_si512(codes);
  return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)codes));
}

/* Adds `runs` times `cols` columns of a row, unless a code is `invalid`, or a sum is not finite:
 * then it returns 0 and has changed nothing. That many columns fit into KT_AUDIT_BLOCK. */
INLINE int quick_runs(const float *w, const int8_t *codes, float step, float limit, const int cut,
                      const int8_t invalid, const int cols, int64_t runs, row_state *row) {
  enum { MOST_RUNS = KT_AUDIT_BLOCK / KT_AUDIT_GROUP_COLS };
  const int is_nibble = invalid == -8;
  group_state *const group = &row->group;
  const __m512 steps = _mm512_set1_ps(step), most = _mm512_set1_ps(limit);
  const __m512 levels =
      _mm512_mul_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1), steps);
  _Alignas(64) float squared[2][MOST_RUNS][LANES];
  __m512 most_source = _mm512_loadu_ps(group->most_source);
  __m512 most_error = _mm512_loadu_ps(group->most_error);
  __m512i squares = _mm512_setzero_si512(), bits = squares;
  int64_t zeros = 0;
  for (int64_t run = 0; run < runs; run++, w += cols, codes += cols) {
    __m512 x[4], e[4], near[4];
    for (int i = 0; i < cols / LANES; i++) {
      const __m128i here = _mm_loadu_si128((const __m128i *)(const void *)(codes + i * LANES));
      const __m512 value =
          is_nibble ? _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(here), levels)
                    : _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(here)), steps);
      x[i] = _mm512_loadu_ps(w + i * LANES);
      e[i] = _mm512_sub_ps(x[i], value);
      if (cut) near[i] = _mm512_sub_ps(within_of(x[i], most), value);
    }
    _mm512_store_ps(squared[0][run], square_sums(x, cols));
    _mm512_store_ps(squared[1][run], square_sums(e, cols));
    most_source = most_sizes(most_source, x, cols);
    most_error = most_sizes(most_error, cut ? near : e, cols);
    const __m512i all = codes_of(codes, cols), size = _mm512_abs_epi8(all);
    const __m512i two = _mm512_maddubs_epi16(size, size); /* INT4: 16 of them fit as well */
    squares = is_nibble ? _mm512_add_epi16(squares, two)
                        : _mm512_add_epi32(squares, _mm512_madd_epi16(two, _mm512_set1_epi16(1)));
    bits = _mm512_or_si512(bits, size);
    zeros += __builtin_popcountll(_mm512_testn_epi8_mask(all, all)) - (KT_AUDIT_COLS - cols);
  }
  if (_mm512_test_epi8_mask(bits, _mm512_set1_epi8(is_nibble ? 8 : -128))) return 0;
  double_sums source = load_sums(row->source), error = load_sums(row->error);
  for (int64_t run = 0; run < runs; run++) {
    source = plus(source, squared[0][run]);
    error = plus(error, squared[1][run]);
  }
  if (!are_finite(source, error)) return 0;
  store_sums(source, row->source);
  store_sums(error, row->error);
  _mm512_storeu_ps(group->most_source, most_source);
  _mm512_storeu_ps(group->most_error, most_error);
  if (is_nibble) squares = _mm512_madd_epi16(squares, _mm512_set1_epi16(1));
  group->squares += _mm512_reduce_add_epi32(squares); /* of KT_AUDIT_BLOCK codes at most */
  group->zeros += zeros;
  return 1;
}

#endif
