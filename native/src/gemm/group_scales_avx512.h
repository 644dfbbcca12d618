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

/* Of each four words, word d: byte first + step * d of the 16, a code as it is stored, times a
 * scale. A float 2^k takes the code in among its bits; the offset is 2^k and what is added to
 * codes, times the scale. It is exact of scales in bf16; of those in binary32 it is rounded, so
 * that all numbers of a group are off alike, by up to 0.00001 (4 bits) or 0.002 of the scale. */
KT_INLINE __m512 kt_group_offset(const int bits, __m512 scale) {
  const float start = bits == 4 ? 128.0f : 32768.0f;
  return _mm512_mul_ps(scale, _mm512_set1_ps(start + (float)KT_GROUP_BIAS(bits)));
}

KT_INLINE __m512 kt_group_numbers(const int bits, const int first, const int step, __m512i codes,
                                  __m512 scale, __m512 offset) {
  const int one = 0x01010101, at = first * one;
  const __m512i order = _mm512_broadcast_i32x4(
      _mm_setr_epi32(at, at + step * one, at + 2 * step * one, at + 3 * step * one));
  const __m512i start = _mm512_castps_si512(_mm512_set1_ps(bits == 4 ? 128.0f : 32768.0f));
  const __mmask64 place = bits == 4 ? 0x4444444444444444u : 0x2222222222222222u;
  const __m512i value = _mm512_mask_shuffle_epi8(start, place, codes, order);
  return _mm512_fmsub_ps(_mm512_castsi512_ps(value), scale, offset);
}

/* Words of the lower and the upper half in turn. */
KT_INLINE __m512i kt_halves_in_turn(void) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

#endif
