/* encoded_integers_avx512.h - runs of integer codes with AVX-512, 16 columns in a vector: what
 * compare_piece (encoded_loop.h) does, operation by operation, so that all bits are the same.
 *
 * A division takes as long as the rest. (One core of an Emerald Rapids, INT4 in groups of 128: 3.7
 * GB/s of bf16 source, 1.9 as the compiler vectorizes it, which stores and adds up each piece.)
 *
 * Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_ENCODED_INTEGERS_AVX512_H
#define KT_AUDIT_ENCODED_INTEGERS_AVX512_H

#include "../simd/unroll.h"
#include "encoded_sums.h"

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

INLINE void compare_run(const float *w, const uint8_t *stored_codes, int64_t count, run_terms run,
                        const int bits, const int half, const int search, group_state *group,
                        row_sums *row, sums *all) {
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
