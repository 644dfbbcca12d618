/* powers_avx512.h - scales that are powers of two (UE8M0), and bf16 numbers times them. Include
 * after a KT_TARGET_BEGIN of AVX-512. */
#ifndef KT_POWERS_AVX512_H
#define KT_POWERS_AVX512_H

#include "bf16_gemm.h"

/* 16 scales as floats. The byte is the exponent; 0 means 2^-127, the one denormal. */
KT_INLINE __m512 kt_power_scales(const uint8_t *scale) {
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)scale);
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
}

/* Whether each of `count` scales, a multiple of 32, is from first to last. */
KT_INLINE int kt_powers_within(const uint8_t *scale, int64_t count, int first, int last) {
  const __m512i least = _mm512_set1_epi8((char)first), most = _mm512_set1_epi8((char)last);
  __mmask64 outside = 0;
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 there = count - i < 64 ? 0xffffffff : ~(__mmask64)0;
    const __m512i v = _mm512_maskz_loadu_epi8(there, scale + i);
    outside |= _mm512_mask_cmplt_epu8_mask(there, v, least);
    outside |= _mm512_mask_cmpgt_epu8_mask(there, v, most);
  }
  return outside == 0;
}

/* ---- What scales add to bf16 bits: (code - 127) << 7 ----
 *
 * Right where neither product nor number is denormal, and the product finite. */

/* Of 16 rows, twice for each: lines of two columns in turn. */
KT_INLINE __m512i kt_power_exponents(const uint8_t *scale) {
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)scale);
  const __m512i steps = _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(127));
  const __m512i high = _mm512_slli_epi32(steps, 23);
  return _mm512_or_si512(high, _mm512_srli_epi32(high, 16));
}

/* Of 32 rows, one after the other: the 32 bits of two are what a line of two rows in turn needs. */
KT_INLINE __m512i kt_power_pairs(const uint8_t *scale) {
  const __m256i codes = _mm256_loadu_si256((const __m256i *)(const void *)scale);
  const __m512i steps = _mm512_sub_epi16(_mm512_cvtepu8_epi16(codes), _mm512_set1_epi16(127));
  return _mm512_slli_epi16(steps, 7);
}

/* A line times scales; zeros stay as they are. */
KT_INLINE __m512i kt_times_powers(__m512i line, __m512i exponents) {
  const __mmask32 nonzero = _mm512_test_epi16_mask(line, _mm512_set1_epi16(0x7fff));
  return _mm512_mask_add_epi16(line, nonzero, line, exponents);
}

#endif
