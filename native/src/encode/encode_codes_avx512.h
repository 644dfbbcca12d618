/* encode_codes_avx512.h - codes of integers and of E2M1 with AVX-512, 16 columns in a vector, with
 * the bits that encode_loop.h describes.
 *
 * A division of a vector takes as long as all else, so quotients are products with the reciprocal.
 * Such a product is at most 3 units of the last place from the rounded quotient (2^-24 of the
 * reciprocal, 2^-24 of the product, half a unit of the quotient), which has the same code unless a
 * number where codes change is as near. Then, for some vector of thousands, columns are divided.
 *
 * Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_ENCODE_CODES_AVX512_H
#define KT_ENCODE_CODES_AVX512_H

#include "../simd/constants_avx512.h"

#include <stdint.h>

#define KT_ENCODE_OWN_CODES
#define KT_OWN static inline __attribute__((always_inline))

enum { OWN_COLS = 16, OWN_NEAR = 4 };

/* A divisor whose reciprocal, and whose products with it, are normal numbers where codes are not 0.
 */
KT_OWN int is_usual_divisor(float divisor) { return divisor >= 0x1p-100f && divisor <= 0x1p100f; }

/* Which of 16 products with these bits may have another code than the quotients: codes change at
 * numbers whose bits, below those of `mask`, are those of `middle`. */
KT_OWN __mmask16 are_near(__m512i bits, const uint32_t mask, const uint32_t middle) {
  const __m512i above = _mm512_add_epi32(bits, kt_in_register((int)(OWN_NEAR - middle)));
  const __m512i apart = _mm512_and_si512(above, kt_in_register((int)mask));
  return _mm512_cmple_epu32_mask(apart, kt_in_register(2 * OWN_NEAR));
}

/* 16 quotients, or numbers with the same codes. */
KT_OWN __m512 own_quotients(__m512 x, __m512 divisor, __m512 inverse, const uint32_t mask,
                            const uint32_t middle) {
  const __m512 y = _mm512_mul_ps(x, inverse);
  const __mmask16 near = are_near(_mm512_castps_si512(y), mask, middle);
  return __builtin_expect(near != 0, 0) ? _mm512_div_ps(x, divisor) : y;
}

/* int_codes */
KT_OWN int64_t own_int_codes(const float *x, int64_t count, float divisor, int32_t top,
                             int32_t bias, const int half, uint8_t *codes) {
  if (!is_usual_divisor(divisor) || (half && divisor > 65504.0f)) return 0; /* infinite */
  const int last = half ? 13 : 16;
  const __m512 by = _mm512_set1_ps(divisor), inverse = _mm512_set1_ps(1.0f / divisor);
  int64_t k = 0;
  for (; k + OWN_COLS <= count; k += OWN_COLS) {
    const __m512 y =
        own_quotients(_mm512_loadu_ps(x + k), by, inverse, (1u << last) - 1, 1u << (last - 1));
    const __m512i bits = _mm512_castps_si512(y);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, kt_in_register(1 << last));
    const __m512i below = _mm512_add_epi32(bits, kt_in_register((1 << (last - 1)) - 1));
    const __m512i up = _mm512_mask_add_epi32(below, odd, below, kt_in_register(1));
    const __m512i kept = _mm512_and_si512(up, kt_in_register((int)(~0u << last)));
    const __m512i code = _mm512_cvt_roundps_epi32(_mm512_castsi512_ps(kept),
                                                  _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512i least = _mm512_min_epi32(code, kt_in_register(top));
    const __m512i within = _mm512_max_epi32(least, kt_in_register(~top));
    const __m512i stored = _mm512_add_epi32(within, kt_in_register(bias));
    _mm_storeu_si128((__m128i *)(void *)(codes + k), _mm512_cvtepi32_epi8(stored));
  }
  return k;
}

/* Codes of E2M1 without their signs, of numbers whose magnitudes have these bits. */
KT_OWN __m512i own_e2m1(__m512i m) {
  const __mmask16 odd = _mm512_test_epi32_mask(m, kt_in_register(1 << 22));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(m, kt_in_register(0x3f800000));
  const __m512i below = _mm512_add_epi32(m, kt_in_register(0x1fffff - (252 << 22)));
  const __m512i up = _mm512_mask_add_epi32(below, odd, below, kt_in_register(1));
  /* twice a magnitude is exact: the sum is rounded once */
  const __m512 ones =
      _mm512_fmadd_ps(_mm512_castsi512_ps(m), _mm512_set1_ps(2.0f), _mm512_set1_ps(12582912.0f));
  const __m512i normal = _mm512_srli_epi32(up, 22);
  const __m512i code = _mm512_mask_sub_epi32(normal, is_small, _mm512_castps_si512(ones),
                                             kt_in_register(0x4b400000));
  return _mm512_min_epu32(code, kt_in_register(7));
}

/* The same of numbers that are not the middle of two codes: what has two bits of significand in
 * common has one code. By these and the last three bits of the exponent, 2 first; what is below 1/8
 * has the code of 1/8, what is from 32 on that of 31. */
KT_OWN __m512i own_e2m1_between(__m512i m) {
  const __m512i from_2 = _mm512_setr_epi32(4, 5, 5, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7);
  const __m512i below_2 = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 4);
  const __m512i within =
      _mm512_min_epi32(_mm512_max_epi32(m, kt_in_register(0x3e000000)), kt_in_register(0x41ffffff));
  return _mm512_permutex2var_epi32(from_2, _mm512_srli_epi32(within, 21), below_2);
}

/* e2m1_codes */
KT_OWN int64_t own_e2m1_codes(const float *x, int64_t count, float divisor, const int power,
                              uint8_t *codes) {
  if (!power && !is_usual_divisor(divisor)) return 0;
  const __m512 by = _mm512_set1_ps(divisor), inverse = _mm512_set1_ps(1.0f / divisor);
  const __m512i magnitudes = kt_in_register(0x7fffffff);
  int64_t k = 0;
  for (; k + OWN_COLS <= count; k += OWN_COLS) {
    const __m512 from = _mm512_loadu_ps(x + k);
    __m512i bits = _mm512_castps_si512(_mm512_mul_ps(from, inverse));
    __m512i code;
    if (power) {
      code = own_e2m1(_mm512_and_si512(bits, magnitudes));
    } else if (__builtin_expect(are_near(bits, (1u << 21) - 1, 0) != 0, 0)) {
      bits = _mm512_castps_si512(_mm512_div_ps(from, by));
      code = own_e2m1(_mm512_and_si512(bits, magnitudes));
    } else {
      code = own_e2m1_between(_mm512_and_si512(bits, magnitudes));
    }
    const __m512i sign = _mm512_srli_epi32(bits, 28);
    /* code | (sign & 8) */
    const __m512i stored = _mm512_ternarylogic_epi32(code, sign, kt_in_register(8), 0xf8);
    _mm_storeu_si128((__m128i *)(void *)(codes + k), _mm512_cvtepi32_epi8(stored));
  }
  return k;
}

/* join_nibbles */
KT_OWN int64_t own_nibbles(const uint8_t *codes, int64_t cols, uint8_t *bytes) {
  int64_t k = 0;
  for (; k + 64 <= cols; k += 64) {
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(codes + k),
                                               _mm512_set1_epi16(0x1001)); /* even + 16 * odd */
    _mm256_storeu_si256((__m256i *)(void *)(bytes + k / 2), _mm512_cvtepi16_epi8(pairs));
  }
  return k;
}

/* Of each pair of lanes that `swap` exchanges, the larger one: of `b` in `lanes`, of `a` in the
 * others. */
#define OWN_LARGER(a, b, lanes, swap)                                                              \
  _mm512_max_epi32(_mm512_mask_blend_epi32(lanes, a, b), swap(_mm512_mask_blend_epi32(lanes, b, a)))
#define OWN_SWAP_1(x) _mm512_shuffle_epi32(x, _MM_PERM_CDAB)
#define OWN_SWAP_2(x) _mm512_shuffle_epi32(x, _MM_PERM_BADC)
#define OWN_SWAP_4(x) _mm512_shuffle_i64x2(x, x, 0xb1)
#define OWN_SWAP_8(x) _mm512_shuffle_i64x2(x, x, 0x4e)

/* Bits of the largest magnitudes of the first groups, as numbers; how many. */
KT_OWN int64_t own_largest(const float *x, int64_t groups, int64_t group, float *most) {
  int64_t g = 0;
  if (group % OWN_COLS) return 0;
  const __m512i magnitudes = kt_in_register(0x7fffffff);
  for (; g + OWN_COLS <= groups; g += OWN_COLS) {
    __m512i of[OWN_COLS];
    for (int i = 0; i < OWN_COLS; i++) {
      const float *const from = x + (g + i) * group;
      of[i] = _mm512_and_si512(_mm512_loadu_si512(from), magnitudes);
      for (int64_t k = OWN_COLS; k < group; k += OWN_COLS)
        of[i] = _mm512_max_epi32(of[i], _mm512_and_si512(_mm512_loadu_si512(from + k), magnitudes));
    }
    for (int i = 0; i < 8; i++) of[i] = OWN_LARGER(of[2 * i], of[2 * i + 1], 0xaaaa, OWN_SWAP_1);
    for (int i = 0; i < 4; i++) of[i] = OWN_LARGER(of[2 * i], of[2 * i + 1], 0xcccc, OWN_SWAP_2);
    for (int i = 0; i < 2; i++) of[i] = OWN_LARGER(of[2 * i], of[2 * i + 1], 0xf0f0, OWN_SWAP_4);
    _mm512_storeu_si512(most + g, OWN_LARGER(of[0], of[1], 0xff00, OWN_SWAP_8));
  }
  return g;
}

#undef OWN_LARGER
#undef OWN_SWAP_1
#undef OWN_SWAP_2
#undef OWN_SWAP_4
#undef OWN_SWAP_8
#undef KT_OWN

#endif
