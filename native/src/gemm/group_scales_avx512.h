/* group_scales_avx512.h - scales of 16 rows, and how a group's sums are added: the same operations
 * with AVX-512 and AMX, so the same bits. Include after a KT_TARGET_BEGIN. */
#ifndef KT_GROUP_SCALES_AVX512_H
#define KT_GROUP_SCALES_AVX512_H

#include "group_gemm.h"

KT_INLINE __m512 kt_group_load_scales(int32_t dtype, const void *scale, int64_t at) {
  if (dtype == KT_SCALE_F32) return _mm512_loadu_ps((const float *)scale + at);
  const uint16_t *const from = (const uint16_t *)scale + at;
  const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

KT_INLINE __m512 kt_group_add(__m512 total, __m512i sum, __m512 scale, __m512 x_scale) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale, x_scale), total);
}

#endif
