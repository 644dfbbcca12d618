/* encoded_floats_avx512.h - columns of floating-point codes with AVX-512, 16 in a vector: what
 * compare_floats (encoded_floats.h) does, operation by operation, so that all bits are the same.
 * What E2M1 needs of a code is in tables of 16 numbers, registers each.
 *
 * Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_AUDIT_ENCODED_FLOATS_AVX512_H
#define KT_AUDIT_ENCODED_FLOATS_AVX512_H

#include "../simd/constants_avx512.h"
#include "../simd/unroll.h"
#include "encoded_sums.h"

#include <math.h>

#define KT_ENCODED_OWN_FLOATS

typedef struct float_sums {
  __m512 source, error, value, most_steps;
  __m512i zeros, others;
} float_sums;

typedef __m512i float_most; /* lanes, of bits */

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
                  /* no magnitude may have a code that is not a number */
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

INLINE float_most compare_floats(const float_kind n, const float *w, const uint8_t *codes,
                                 float divisor, const int power, const int span, float_sums *sum) {
  const __m512 by = _mm512_set1_ps(divisor), inverse = _mm512_set1_ps(1.0f / divisor);
  __m512i most = compare_16(n, w, codes, by, inverse, power, sum);
  if (span == PIECE)
    most = _mm512_max_epi32(most, compare_16(n, w + LANES, codes + LANES, by, inverse, power, sum));
  return most;
}

/* By code of E2M1 (8 magnitudes, then their negatives): what it stands for, and the interval of
 * quotients that have it for certain and are less than `known` steps off. */
typedef struct float_bounds {
  __m512 level, first, last;
  __m512i magnitude, one; /* constants */
} float_bounds;

INLINE __m512 twice_ps(float a, float b, float c, float d, float e, float f, float g, float h) {
  return _mm512_setr_ps(a, b, c, d, e, f, g, h, a, b, c, d, e, f, g, h);
}

INLINE float_bounds float_bounds_of(float known) {
  const __m512 level = twice_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m512 step = twice_ps(0.5f, 0.5f, 0.5f, 0.5f, 1.0f, 1.0f, 2.0f, 2.0f);
  const __m512 first = twice_ps(0.0f, ABOVE(0.25f), ABOVE(0.75f), ABOVE(1.25f), ABOVE(1.75f),
                                ABOVE(2.5f), ABOVE(3.5f), ABOVE(5.0f));
  const __m512 last = twice_ps(BELOW(0.25f), BELOW(0.75f), BELOW(1.25f), BELOW(1.75f), BELOW(2.5f),
                               BELOW(3.5f), BELOW(5.0f), INFINITY);
  const __m512 reach = _mm512_mul_ps(step, _mm512_set1_ps(certain_steps(known)));
  const __m512 from = _mm512_max_ps(first, _mm512_sub_ps(level, reach));
  const __m512 until = _mm512_min_ps(last, _mm512_add_ps(level, reach));
  const __m512 minus = _mm512_set1_ps(-0.0f);
  const __mmask16 negative = 0xff00;
  return (float_bounds){_mm512_mask_xor_ps(level, negative, level, minus),
                        _mm512_mask_xor_ps(from, negative, until, minus),
                        _mm512_mask_xor_ps(until, negative, from, minus), kt_in_register(7),
                        kt_in_register(1)};
}

/* Adds 16 columns of E2M1, `within` only if all weights are in their intervals; magnitudes. */
INLINE __m512i add_certain(const float *from, const uint8_t *codes, float_bounds at,
                           __mmask16 *within, float_sums *sum) {
  const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
  const __m512 w = _mm512_loadu_ps(from), value = _mm512_permutexvar_ps(code, at.level);
  const __m512 error = _mm512_sub_ps(w, value);
  const __m512 first = _mm512_permutexvar_ps(code, at.first);
  const __m512 last = _mm512_permutexvar_ps(code, at.last);
  *within = _mm512_mask_cmp_ps_mask(*within, w, first, _CMP_GE_OQ);
  *within = _mm512_mask_cmp_ps_mask(*within, w, last, _CMP_LE_OQ);
  const __mmask16 zero = _mm512_testn_epi32_mask(code, at.magnitude);
  sum->zeros = _mm512_mask_add_epi32(sum->zeros, zero, sum->zeros, at.one);
  sum->source = _mm512_add_ps(sum->source, _mm512_mul_ps(w, w));
  sum->error = _mm512_add_ps(sum->error, _mm512_mul_ps(error, error));
  sum->value = _mm512_add_ps(sum->value, _mm512_mul_ps(value, value));
  return _mm512_and_si512(_mm512_castps_si512(w), _mm512_set1_epi32(0x7fffffff));
}

/* A division takes as long as the rest. Products with powers of two are exact, and often the middle
 * between two codes: there is no interval for these. */
INLINE float_most compare_group(const float_kind n, const float *w, const uint8_t *codes,
                                float divisor, const int power, const int span,
                                const float_bounds *bounds, float_sums *sum) {
  if (n.sign == 3 && !power && divisor >= 0x1p-100f && divisor <= 0x1p100f) { /* normal products */
    const __m512 by = _mm512_set1_ps(divisor);
    float_bounds at = *bounds;
    at.level = _mm512_mul_ps(at.level, by);
    at.first = _mm512_mul_ps(at.first, by);
    at.last = _mm512_mul_ps(at.last, by);
    float_sums more = *sum;
    __mmask16 within = 0xffff;
    __m512i most = add_certain(w, codes, at, &within, &more);
    if (span == PIECE)
      most = _mm512_max_epi32(most, add_certain(w + LANES, codes + LANES, at, &within, &more));
    if (__builtin_expect(within == 0xffff, 1)) {
      *sum = more;
      return most;
    }
  }
  return compare_floats(n, w, codes, divisor, power, span, sum);
}

INLINE int32_t bits_of_most(float_most most) { return _mm512_reduce_max_epi32(most); }

/* The largest lanes of 16 vectors, by pairs: each step leaves half of the lanes. */
INLINE __m512i largest_lanes(const __m512i *of) {
  __m512i four[4], two[2];
  for (int i = 0; i < 4; i++) {
    const __m512i a = of[4 * i], b = of[4 * i + 1], c = of[4 * i + 2], d = of[4 * i + 3];
    const __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    four[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }
  for (int i = 0; i < 2; i++) {
    const __m512i a = four[2 * i], b = four[2 * i + 1];
    two[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
  }
  return _mm512_max_epi32(_mm512_shuffle_i64x2(two[0], two[1], 0x88),
                          _mm512_shuffle_i64x2(two[0], two[1], 0xdd));
}

INLINE void bits_of_all(const float_most *most, int64_t groups, int32_t *bits) {
  int64_t g = 0;
  for (; g + LANES <= groups; g += LANES) _mm512_storeu_si512(bits + g, largest_lanes(most + g));
  for (; g < groups; g++) bits[g] = bits_of_most(most[g]);
}

#endif
