/* fp4_scales_avx512.h - packed scales of MXFP4 and NVFP4. Include after a KT_TARGET_BEGIN of
 * AVX-512. */
#ifndef KT_FP4_SCALES_AVX512_H
#define KT_FP4_SCALES_AVX512_H

#include "../gemm/powers_avx512.h"
#include "fp4.h"

/* 16 packed scales of MXFP4 as floats. */
KT_INLINE __m512 kt_mxfp4_scales(int32_t dtype, const void *scale, int64_t at) {
  if (dtype == KT_SCALE_BF16) {
    const uint16_t *const from = (const uint16_t *)scale + at;
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  return kt_power_scales((const uint8_t *)scale + at);
}

/* 16 E4M3 scales of NVFP4, as halves of the same mantissa, whose exponents are 8 smaller. */
KT_INLINE __m512 kt_nvfp4_scales(const uint8_t *from) {
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)from);
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
  const __m256i halves =
      _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16((short)0xbf80));
  return _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0f));
}

#endif
