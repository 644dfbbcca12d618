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

/* 16 quotients, or numbers with the same codes; codes change at numbers whose bits, below those of
 * `mask`, are those of `middle`. */
KT_OWN __m512 own_quotients(__m512 x, __m512 divisor, __m512 inverse, const uint32_t mask,
                            const uint32_t middle) {
  const __m512 y = _mm512_mul_ps(x, inverse);
  const __m512i above =
      _mm512_add_epi32(_mm512_castps_si512(y), kt_in_register((int)(OWN_NEAR - middle)));
  const __m512i apart = _mm512_and_si512(above, kt_in_register((int)mask));
  const __mmask16 near = _mm512_cmple_epu32_mask(apart, kt_in_register(2 * OWN_NEAR));
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

/* e2m1_codes */
KT_OWN int64_t own_e2m1_codes(const float *x, int64_t count, float divisor, const int power,
                              uint8_t *codes) {
  if (!power && !is_usual_divisor(divisor)) return 0;
  const __m512 by = _mm512_set1_ps(divisor), inverse = _mm512_set1_ps(1.0f / divisor);
  const __m512i magnitudes = kt_in_register(0x7fffffff);
  int64_t k = 0;
  for (; k + OWN_COLS <= count; k += OWN_COLS) {
    const __m512 from = _mm512_loadu_ps(x + k);
    const __m512 y =
        power ? _mm512_mul_ps(from, inverse) : own_quotients(from, by, inverse, (1u << 21) - 1, 0);
    const __m512i bits = _mm512_castps_si512(y), m = _mm512_and_si512(bits, magnitudes);
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
    const __m512i least = _mm512_min_epu32(code, kt_in_register(7));
    const __m512i sign = _mm512_srli_epi32(bits, 28);
    /* least | (sign & 8) */
    const __m512i stored = _mm512_ternarylogic_epi32(least, sign, kt_in_register(8), 0xf8);
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

#undef KT_OWN

#endif
