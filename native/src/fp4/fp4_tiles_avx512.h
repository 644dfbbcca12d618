/* fp4_tiles_avx512.h - decoding MXFP4 and NVFP4 to bf16. Include after
 * KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_FP4_TILES_AVX512_H
#define KT_FP4_TILES_AVX512_H

#include "fp4_gemm_avx512.h"
#include "fp4_scales_avx512.h"

/* ---- MXFP4 ------------------------------------------------------------------- */

/* Lines 4 part .. 4 part + 3 of both halves of a tile of bf16, part < 4; out: 64-byte aligned.
 * exponents: NULL, or those of the 32 rows. */
KT_INLINE void kt_mxfp4_decode_part(const uint8_t *tile, const uint8_t *exponents, const int part,
                                    uint8_t *out) {
  const __m512i table = kt_fp4_table(), zero = _mm512_setzero_si512();
  const __m512i add0 = exponents ? kt_power_exponents(exponents) : zero;
  const __m512i add1 = exponents ? kt_power_exponents(exponents + KT_HALF_ROWS) : zero;
  KT_UNROLL(4)
  for (int p = 4 * part; p < 4 * part + 4; p++) {
    __m512i line0, line1;
    kt_fp4_decode(table, _mm512_loadu_si512(tile + p / 2 * KT_LINE), p % 2, &line0, &line1);
    _mm512_store_si512(out + p * KT_LINE, kt_times_powers(line0, add0));
    _mm512_store_si512(out + KT_BF16_HALF_TILE + p * KT_LINE, kt_times_powers(line1, add1));
  }
}

/* ---- NVFP4 ------------------------------------------------------------------- */

/* A line of bf16 times the scales of its 16 rows, exact. */
KT_INLINE __m512i kt_nvfp4_scaled_line(__m512i line, __m512 scale) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(line, upper));
  const __m512i low = _mm512_castps_si512(_mm512_mul_ps(even, scale));
  const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}

/* Lines 4 part .. 4 part + 3 of both halves of a tile of bf16, part < 4; out: 64-byte aligned. */
KT_INLINE void kt_nvfp4_decode_part(const uint8_t *tile, const int part, uint8_t *out) {
  const int group = part / (4 / KT_NVFP4_TILE_GROUPS);
  const __m512i table = kt_fp4_table();
  const __m512 scale0 = kt_nvfp4_scales(tile + KT_FP4_TILE + group * KT_STRIP);
  const __m512 scale1 = kt_nvfp4_scales(tile + KT_FP4_TILE + group * KT_STRIP + KT_HALF_ROWS);
  KT_UNROLL(4)
  for (int p = 4 * part; p < 4 * part + 4; p++) {
    __m512i line0, line1;
    kt_fp4_decode(table, _mm512_loadu_si512(tile + p / 2 * KT_LINE), p % 2, &line0, &line1);
    _mm512_store_si512(out + p * KT_LINE, kt_nvfp4_scaled_line(line0, scale0));
    _mm512_store_si512(out + KT_BF16_HALF_TILE + p * KT_LINE, kt_nvfp4_scaled_line(line1, scale1));
  }
}

#endif
