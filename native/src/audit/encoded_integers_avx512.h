/* encoded_integers_avx512.h - runs of integer codes with AVX-512, 16 columns in a vector: what
 * compare_piece (encoded_loop.h) does, operation by operation, so that all bits are the same.
 *
 * A division takes as long as the rest, so that INT4 is compared without: each code has an interval
 * of weights whose code it is for certain, and which are no more steps off it than another weight
 * is. Where one of a run is not in its interval, as where a code changes, the run is compared again
 * with divisions.
 *
 * Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_ENCODED_INTEGERS_AVX512_H
#define KT_AUDIT_ENCODED_INTEGERS_AVX512_H

#include "../simd/unroll.h"
#include "encoded_sums.h"

#include <math.h>

#define KT_ENCODED_OWN_RUN

typedef struct vector_sums {
  __m512 source, error, value, most_steps;
  __m512i most;
  int64_t zeros, others;
} vector_sums;

/* 32 codes, less their offset. */
INLINE void vectors_of(const uint8_t *stored_codes, const int bits, __m512i *first,
                       __m512i *second) {
  __m256i bytes;
  if (bits == 8) {
    bytes = _mm256_loadu_si256((const __m256i *)(const void *)stored_codes);
  } else { /* a byte as a word, and again four bits further up: both nibbles begin a byte */
    const __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)stored_codes);
    const __m256i words = _mm256_cvtepu8_epi16(pairs);
    const __m256i both = _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
    bytes = _mm256_and_si256(both, _mm256_set1_epi8(15));
  }
  const __m512i offset = _mm512_set1_epi32(1 << (bits - 1));
  *first = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes)), offset);
  *second = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)), offset);
}

/* A quotient rounded to the dtype of the weights: `narrowed`. */
INLINE __m512 narrowed_vector(__m512 quotient, const int half) {
  const int last = half ? 13 : 16;
  const __m512i bits = _mm512_castps_si512(quotient);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << last));
  const __m512i below = _mm512_add_epi32(bits, _mm512_set1_epi32((1 << (last - 1)) - 1));
  const __m512i up = _mm512_mask_add_epi32(below, odd, below, _mm512_set1_epi32(1));
  return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)(~0u << last))));
}

INLINE void compare_vector(const float *from, __m512i code, __m512 scale, __m512 precise,
                           const int bits, const int half, const int search, vector_sums *sum) {
  const __m512 top = _mm512_set1_ps((float)((1 << (bits - 1)) - 1));
  const __m512 bottom = _mm512_set1_ps((float)-(1 << (bits - 1)));
  const __m512 w = _mm512_loadu_ps(from), level = _mm512_cvtepi32_ps(code);
  const __m512 quotient = _mm512_div_ps(w, scale);
  const __m512 rounded = search ? quotient : narrowed_vector(quotient, half);
  /* NaN becomes `top`, as there. Limits are integers: they may come before rounding. */
  const __m512 within = _mm512_max_ps(_mm512_min_ps(rounded, top), bottom);
  const __m512i nearest =
      _mm512_cvt_roundps_epi32(within, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(0x7fffffff));
  const __m512 value = _mm512_mul_ps(level, scale), error = _mm512_sub_ps(w, value);
  const __m512 steps = _mm512_mul_ps(_mm512_abs_ps(_mm512_sub_ps(quotient, level)), precise);
  sum->most = _mm512_max_epi32(sum->most, magnitude);
  sum->most_steps = _mm512_max_ps(steps, sum->most_steps); /* not a NaN */
  sum->zeros += __builtin_popcount(_mm512_testn_epi32_mask(code, code));
  sum->others += __builtin_popcount(_mm512_cmpneq_epi32_mask(code, nearest));
  sum->source = _mm512_add_ps(sum->source, _mm512_mul_ps(w, w));
  sum->error = _mm512_add_ps(sum->error, _mm512_mul_ps(error, error));
  sum->value = _mm512_add_ps(sum->value, _mm512_mul_ps(value, value));
}

/* The number between two codes from which on a quotient has the upper one: the middle, which a
 * quotient on its other side, half a unit of the narrowed numbers there away, becomes by narrowing.
 * The even code has the middle. `u`: the unit of the narrowed numbers from 1/2 on. */
#define EDGES(E, u)                                                                                \
  E(-7.5f + 4 * (u)), E(-6.5f - 4 * (u)), E(-5.5f + 4 * (u)), E(-4.5f - 4 * (u)),                  \
      E(-3.5f + 2 * (u)), E(-2.5f - 2 * (u)), E(-1.5f + (u)), E(-0.5f - (u) / 2),                  \
      E(0.5f + (u) / 2), E(1.5f - (u)), E(2.5f + 2 * (u)), E(3.5f - 2 * (u)), E(4.5f + 4 * (u)),   \
      E(5.5f - 4 * (u)), E(6.5f + 4 * (u))
#define INTERVALS(u)                                                                               \
  {                                                                                                \
    {-INFINITY, EDGES(ABOVE, u)}, { EDGES(BELOW, u), INFINITY }                                    \
  }

/* [search, binary16 or bf16][first, last][code]: quotients. */
static const float int4_intervals[3][2][LANES] = {INTERVALS(0.0f), INTERVALS(0x1p-11f),
                                                  INTERVALS(0x1p-8f)};
#undef INTERVALS
#undef EDGES

/* Weights that codes stand for, and the intervals around them: all of these are no more than
 * `known` steps off. */
typedef struct int4_weights {
  __m512 value, first, last;
} int4_weights;

INLINE int4_weights int4_weights_of(__m512 scale, float known, const int half, const int search) {
  const float (*const interval)[LANES] = int4_intervals[search ? 0 : half ? 1 : 2];
  const __m512 level = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512 reach = _mm512_set1_ps(certain_steps(known));
  const __m512 first = _mm512_max_ps(_mm512_loadu_ps(interval[0]), _mm512_sub_ps(level, reach));
  const __m512 last = _mm512_min_ps(_mm512_loadu_ps(interval[1]), _mm512_add_ps(level, reach));
  return (int4_weights){_mm512_mul_ps(level, scale), _mm512_mul_ps(first, scale),
                        _mm512_mul_ps(last, scale)};
}

/* 16 codes of 4 bits, each with others above it. */
INLINE __m512i nibbles_of(const uint8_t *stored_codes) {
  const __m512i words =
      _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)(const void *)stored_codes));
  const __m512i word = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  return _mm512_srlv_epi32(_mm512_permutexvar_epi32(word, words), shift);
}

/* Adds a run of INT4 that is what it should be: 1, or 0 where a weight is not in its interval. */
INLINE int is_certain_run(const float *w, const uint8_t *stored_codes, int64_t count, run_terms run,
                          float known, const int half, const int search, group_state *group,
                          row_sums *row, sums *all) {
  if (!(run.scale >= 0x1p-100f && run.scale <= 0x1p100f)) return 0; /* products are normal */
  const int4_weights at = int4_weights_of(_mm512_set1_ps(run.scale), known, half, search);
  __m512 source = _mm512_loadu_ps(row->source), error = _mm512_loadu_ps(row->error),
         value = _mm512_loadu_ps(row->value);
  __m512i most = _mm512_set1_epi32(group->most);
  __mmask16 within = 0xffff;
  int64_t zeros = 0;
  for (int64_t c = 0; c < count; c += LANES) {
    const __m512i code = nibbles_of(stored_codes + c / 2);
    const __m512 x = _mm512_loadu_ps(w + c), here = _mm512_permutexvar_ps(code, at.value);
    const __m512 off = _mm512_sub_ps(x, here);
    within = _mm512_mask_cmp_ps_mask(within, x, _mm512_permutexvar_ps(code, at.first), _CMP_GE_OQ);
    within = _mm512_mask_cmp_ps_mask(within, x, _mm512_permutexvar_ps(code, at.last), _CMP_LE_OQ);
    const __m512i bits = _mm512_castps_si512(x), here_bits = _mm512_castps_si512(here);
    most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    zeros += __builtin_popcount(_mm512_testn_epi32_mask(here_bits, here_bits));
    source = _mm512_add_ps(source, _mm512_mul_ps(x, x));
    error = _mm512_add_ps(error, _mm512_mul_ps(off, off));
    value = _mm512_add_ps(value, _mm512_mul_ps(here, here));
  }
  if (within != 0xffff) return 0;
  _mm512_storeu_ps(row->source, source);
  _mm512_storeu_ps(row->error, error);
  _mm512_storeu_ps(row->value, value);
  group->most = _mm512_reduce_max_epi32(most);
  all->zeros += zeros;
  return 1;
}

INLINE void compare_run(const float *w, const uint8_t *stored_codes, int64_t count, run_terms run,
                        const int bits, const int half, const int search, group_state *group,
                        row_sums *row, sums *all) {
  if (bits == 4 &&
      is_certain_run(w, stored_codes, count, run, all->known, half, search, group, row, all))
    return;
  const __m512 scale = _mm512_set1_ps(run.scale), precise = _mm512_set1_ps(run.precise);
  vector_sums sum = {_mm512_loadu_ps(row->source),
                     _mm512_loadu_ps(row->error),
                     _mm512_loadu_ps(row->value),
                     _mm512_loadu_ps(row->most_steps),
                     _mm512_set1_epi32(group->most),
                     0,
                     0};
  for (int64_t c = 0; c < count; c += PIECE) {
    __m512i first, second;
    vectors_of(stored_codes + c * bits / 8, bits, &first, &second);
    compare_vector(w + c, first, scale, precise, bits, half, search, &sum);
    compare_vector(w + c + LANES, second, scale, precise, bits, half, search, &sum);
  }
  _mm512_storeu_ps(row->source, sum.source);
  _mm512_storeu_ps(row->error, sum.error);
  _mm512_storeu_ps(row->value, sum.value);
  _mm512_storeu_ps(row->most_steps, sum.most_steps);
  group->most = _mm512_reduce_max_epi32(sum.most);
  all->zeros += sum.zeros;
  all->others += sum.others;
}

#endif
