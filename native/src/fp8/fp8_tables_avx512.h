/* fp8_tables_avx512.h - what kt_fp8_lines looks up. Include after KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_FP8_TABLES_AVX512_H
#define KT_FP8_TABLES_AVX512_H

#include "../gemm/bf16_gemm_avx512.h"
#include "fp8.h"

KT_INLINE kt_line_tables kt_fp8_tables(void) {
  _Alignas(64) uint8_t high[128], low[128];
  for (int i = 0; i < 128; i++) {
    high[i] = (uint8_t)(kt_fp8_bf16[i] >> 8);
    low[i] = (uint8_t)kt_fp8_bf16[i];
  }
  return (kt_line_tables){
      .high0 = _mm512_load_si512(high),
      .high64 = _mm512_load_si512(high + 64),
      .low0 = _mm512_load_si512(low),
      .low64 = _mm512_load_si512(low + 64),
  };
}

#endif
