/* Activation rows with AVX-512; the same bits as rows.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "rows.h"

static uint32_t max_bits(const float *x, int64_t cols) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i max = _mm512_setzero_si512();
  for (int64_t k = 0; k < cols; k += 16)
    max = _mm512_max_epu32(max, _mm512_and_si512(_mm512_loadu_si512(x + k), magnitude));
  return _mm512_reduce_max_epu32(max);
}

void kt_rows_codes_avx512(const float *x, int64_t cols, int8_t *codes, float *scale, int32_t *sum) {
  const uint32_t max = max_bits(x, cols);
  float inverse;
  *scale = kt_rows_scale(max, &inverse);
  *sum = 0;
  if (max >= KT_NONFINITE_BITS) {
    memset(codes, 0, (size_t)cols);
    return;
  }
  const __m512 factor = _mm512_set1_ps(inverse);
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < cols; k += 16) {
    const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + k), factor);
    const __m512i code = _mm512_cvt_roundps_epi32(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    total = _mm512_add_epi32(total, code);
    _mm_storeu_si128((__m128i *)(void *)(codes + k), _mm512_cvtepi32_epi8(code));
  }
  *sum = _mm512_reduce_add_epi32(total);
}

void kt_rows_bf16_avx512(const float *x, int64_t n, uint16_t *out) {
  const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(0x7fff);
  const __m512i quiet = _mm512_set1_epi32(0x00400000);
  for (int64_t i = 0; i < n; i += 16) {
    const __m512 value = _mm512_loadu_ps(x + i);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, half), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(up, nan, bits, quiet);
    _mm256_storeu_si256((__m256i *)(void *)(out + i),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
}

void kt_rows_f16_avx512(const float *x, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i += 16)
    _mm256_storeu_si256((__m256i *)(void *)(out + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
}

KT_TARGET_END
#endif
