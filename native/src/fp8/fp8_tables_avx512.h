/* fp8_tables_avx512.h - what kt_fp8_lines looks up. Include after KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_FP8_TABLES_AVX512_H
#define KT_FP8_TABLES_AVX512_H

#include "../gemm/bf16_gemm_avx512.h"
#include "fp8.h"

KT_INLINE kt_line_tables kt_fp8_tables(void) {
  return (kt_line_tables){
      .high0 = _mm512_loadu_si512(kt_e4m3_bytes[1]),
      .high64 = _mm512_loadu_si512(kt_e4m3_bytes[1] + 64),
      .low0 = _mm512_loadu_si512(kt_e4m3_bytes[0]),
      .low64 = _mm512_loadu_si512(kt_e4m3_bytes[0] + 64),
  };
}

#endif
