/* encoded_floats_avx512.h - columns of floating-point codes with AVX-512, 16 in a vector: what
 * compare_floats (encoded_floats.h) does, operation by operation, so that all bits are the same.
 * What E2M1 needs of a code is in tables of 16 numbers, registers each.
 *
 * Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_ENCODED_FLOATS_AVX512_H
#define KT_AUDIT_ENCODED_FLOATS_AVX512_H

#include "../simd/unroll.h"
#include "encoded_sums.h"

#define KT_ENCODED_OWN_FLOATS

typedef struct float_sums {
  __m512 source, error, value, most_steps;
  __m512i zeros, others;
} float_sums;

INLINE void begin_floats(float_sums *sum) {
  const __m512 none = _mm512_setzero_ps();
  *sum = (float_sums){none, none, none, none, _mm512_setzero_si512(), _mm512_setzero_si512()};
}

INLINE void end_floats(const float_sums *sum, row_sums *row) {
  _mm512_storeu_ps(row->source, sum->source);
  _mm512_storeu_ps(row->error, sum->error);
  _mm512_storeu_ps(row->value, sum->value);
  _mm512_storeu_ps(row->most_steps, sum->most_steps);
  _mm512_storeu_si512(row->zeros, sum->zeros);
  _mm512_storeu_si512(row->others, sum->others);
}

/* Of 16 codes: the magnitudes that they stand for, in how many of which a unit is, and the bits of
 * the least and largest magnitudes to which each is nearest. */
typedef struct places {
  __m512 level, per_step;
  __m512i first, last;
} places;

#define TWICE(...) _mm512_setr_epi32(__VA_ARGS__, __VA_ARGS__)

INLINE places e2m1_places(__m512i code) {
  /* 0, 1/2, 1, 3/2, 2, 3, 4, 6; middles are the even one's */
  const __m512i levels =
      TWICE(0, 0x3f000000, 0x3f800000, 0x3fc00000, 0x40000000, 0x40400000, 0x40800000, 0x40c00000);
  const __m512i first =
      TWICE(0, 0x3e800001, 0x3f400000, 0x3fa00001, 0x3fe00000, 0x40200001, 0x40600000, 0x40a00001);
  const __m512i last = TWICE(0x3e800000, 0x3f3fffff, 0x3fa00000, 0x3fdfffff, 0x40200000, 0x405fffff,
                             0x40a00000, 0x7f800000);
  const __m512i per_step = TWICE(0x40000000, 0x40000000, 0x40000000, 0x40000000, 0x3f800000,
                                 0x3f800000, 0x3f000000, 0x3f000000);
  return (places){_mm512_castsi512_ps(_mm512_permutexvar_epi32(code, levels)),
                  _mm512_castsi512_ps(_mm512_permutexvar_epi32(code, per_step)),
                  _mm512_permutexvar_epi32(code, first), _mm512_permutexvar_epi32(code, last)};
}

#undef TWICE

/* magnitude_bits */
INLINE __m512i magnitude_vector(const float_kind n, __m512i place, const int halves) {
  const __m512 count =
      _mm512_add_ps(_mm512_cvtepi32_ps(place), _mm512_set1_ps(0.5f * (float)halves));
  const __m512 small = _mm512_mul_ps(count, _mm512_set1_ps(n.least));
  const int32_t fields = (n.bias << 23) + (halves << (n.shift - 1));
  const __m512i normal =
      _mm512_add_epi32(_mm512_slli_epi32(place, (unsigned)n.shift), _mm512_set1_epi32(fields));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(place, _mm512_set1_epi32(n.normal));
  return _mm512_mask_mov_epi32(normal, is_small, _mm512_castps_si512(small));
}

/* is_nearest, per_step */
INLINE places e4m3_places(const float_kind n, __m512i code) {
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i place = _mm512_and_si512(code, _mm512_set1_epi32((1 << n.sign) - 1));
  const __m512i odd = _mm512_and_si512(code, one);
  const __m512i here = magnitude_vector(n, place, 0);
  const __m512i before = _mm512_max_epi32(magnitude_vector(n, _mm512_sub_epi32(place, one), 1),
                                          _mm512_setzero_si512()); /* negative for place 0 */
  const __m512i behind = magnitude_vector(n, place, 1);
  const __mmask16 is_top = _mm512_cmpeq_epi32_mask(place, _mm512_set1_epi32(n.top));
  const __mmask16 is_number = _mm512_cmple_epi32_mask(place, _mm512_set1_epi32(n.top));
  const __m512i until =
      _mm512_mask_mov_epi32(_mm512_sub_epi32(behind, odd), is_top, _mm512_set1_epi32(0x7f800000));
  const __m512i power = _mm512_sub_epi32(_mm512_and_si512(here, _mm512_set1_epi32(0x7f800000)),
                                         _mm512_set1_epi32((23 - n.shift) << 23));
  const __m512i least_power = _mm512_set1_epi32((int)bits_of(n.least));
  const __m512i per_step =
      _mm512_sub_epi32(_mm512_set1_epi32(254 << 23), _mm512_max_epi32(power, least_power));
  return (places){_mm512_castsi512_ps(here), _mm512_castsi512_ps(per_step),
                  _mm512_add_epi32(before, odd),
                  /* where the code is no number, no magnitude is small enough to have it */
                  _mm512_mask_mov_epi32(_mm512_set1_epi32(INT32_MIN), is_number, until)};
}

INLINE __m512i compare_16(const float_kind n, const float *from, const uint8_t *codes,
                          __m512 divisor, __m512 inverse, const int power, float_sums *sum) {
  const __m512i magnitudes = _mm512_set1_epi32(0x7fffffff), one = _mm512_set1_epi32(1);
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
  const places at = n.sign == 3 ? e2m1_places(code) : e4m3_places(n, code);
  const __m512 w = _mm512_loadu_ps(from);
  const __m512i bits = _mm512_castps_si512(w), magnitude = _mm512_and_si512(bits, magnitudes);
  const __m512 size = _mm512_castsi512_ps(magnitude);
  const __m512 q = power ? _mm512_mul_ps(size, inverse) : _mm512_div_ps(size, divisor);
  const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(code, (unsigned)n.sign), 31);
  const __m512i q_bits = _mm512_castps_si512(q);
  const __mmask16 nearest =
      _mm512_cmpge_epi32_mask(q_bits, at.first) & _mm512_cmple_epi32_mask(q_bits, at.last);
  const __mmask16 opposite = _mm512_movepi32_mask(_mm512_xor_si512(bits, sign)) &
                             _mm512_cmp_ps_mask(q, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  const __mmask16 other = (__mmask16)(~nearest | opposite);
  const __mmask16 zero = _mm512_testn_epi32_mask(code, _mm512_set1_epi32((1 << n.sign) - 1));
  const __m512i unsigned_value = _mm512_castps_si512(_mm512_mul_ps(at.level, divisor));
  const __m512 value = _mm512_castsi512_ps(_mm512_or_si512(unsigned_value, sign));
  const __m512 error = _mm512_sub_ps(w, value);
  const __m512 steps = _mm512_mul_ps(_mm512_abs_ps(_mm512_sub_ps(q, at.level)), at.per_step);
  sum->most_steps = _mm512_max_ps(steps, sum->most_steps); /* not a NaN */
  sum->zeros = _mm512_mask_add_epi32(sum->zeros, zero, sum->zeros, one);
  sum->others = _mm512_mask_add_epi32(sum->others, other, sum->others, one);
  sum->source = _mm512_add_ps(sum->source, _mm512_mul_ps(w, w));
  sum->error = _mm512_add_ps(sum->error, _mm512_mul_ps(error, error));
  sum->value = _mm512_add_ps(sum->value, _mm512_mul_ps(value, value));
  return magnitude;
}

INLINE int32_t compare_floats(const float_kind n, const float *w, const uint8_t *codes,
                              float divisor, const int power, const int span, float_sums *sum) {
  const __m512 by = _mm512_set1_ps(divisor), inverse = _mm512_set1_ps(1.0f / divisor);
  __m512i most = compare_16(n, w, codes, by, inverse, power, sum);
  if (span == PIECE)
    most = _mm512_max_epi32(most, compare_16(n, w + LANES, codes + LANES, by, inverse, power, sum));
  return _mm512_reduce_max_epi32(most);
}

#endif
