/* fp8_tables_avx512.h - what kt_fp8_lines looks up. Include after KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_FP8_TABLES_AVX512_H
#define KT_FP8_TABLES_AVX512_H

#include "../gemm/bf16_gemm_avx512.h"
#include "fp8.h"

/* Bytes 0 or 1 of 64 numbers. */
KT_INLINE __m512i kt_fp8_bytes(const uint16_t *numbers, const int upper) {
  __m512i half[2];
  for (int i = 0; i < 2; i++) {
    half[i] = _mm512_loadu_si512(numbers + 32 * i);
    if (upper) half[i] = _mm512_srli_epi16(half[i], 8);
  }
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(half[0])),
                            _mm512_cvtepi16_epi8(half[1]), 1);
}

KT_INLINE kt_line_tables kt_fp8_tables(void) {
  return (kt_line_tables){
      .high0 = kt_fp8_bytes(kt_e4m3_bf16, 1),
      .high64 = kt_fp8_bytes(kt_e4m3_bf16 + 64, 1),
      .low0 = kt_fp8_bytes(kt_e4m3_bf16, 0),
      .low64 = kt_fp8_bytes(kt_e4m3_bf16 + 64, 0),
  };
}

#endif
