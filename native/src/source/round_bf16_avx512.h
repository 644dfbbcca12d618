/* round_bf16_avx512.h - binary32 to the nearest bfloat16, ties to even; NaN and Inf stay. */
#ifndef KT_ROUND_BF16_AVX512_H
#define KT_ROUND_BF16_AVX512_H

#include "../simd/target.h"

KT_INLINE __m512 kt_round_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
  const __m512i rounded =
      _mm512_and_si512(_mm512_add_epi32(bits, half), _mm512_set1_epi32((int)0xffff0000u));
  const __m512i exponent = _mm512_set1_epi32(0x7f800000);
  const __mmask16 special = _mm512_cmpeq_epi32_mask(_mm512_and_si512(bits, exponent), exponent);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(rounded, special, bits));
}

#endif
