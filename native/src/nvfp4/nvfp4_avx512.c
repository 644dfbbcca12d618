/* NVFP4 products with AVX-512 BF16 (fp4_gemm_avx512.h). Sums of 16 columns are multiplied by their
 * E4M3 scale, the sum of a row by its own, last. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/fp4_gemm_avx512.h"
#include "../gemm/row_scales_avx512.h"
#include "nvfp4_scales_avx512.h"

KT_INLINE __m512 scales_of(const kt_fp4_columns *w, const uint8_t *tile, int64_t group, int row) {
  (void)w;
  return kt_nvfp4_scales(tile + KT_FP4_TILE + group % KT_NVFP4_TILE_GROUPS * KT_STRIP + row);
}

/* A line of bf16 times the scales of its 16 rows, exact. */
KT_INLINE __m512i scaled_line(__m512i line, __m512 scale) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(line, upper));
  const __m512i low = _mm512_castps_si512(_mm512_mul_ps(even, scale));
  const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}

void kt_nvfp4_decode_tiles(const uint8_t *codes, int64_t tiles, uint8_t *out) {
  const __m512i table = kt_fp4_table();
  for (int64_t i = 0; i < tiles; i++, codes += KT_NVFP4_TILE, out += KT_BF16_TILE)
    for (int g = 0; g < KT_NVFP4_TILE_GROUPS; g++) {
      const __m512 scale0 = kt_nvfp4_scales(codes + KT_FP4_TILE + g * KT_STRIP);
      const __m512 scale1 = kt_nvfp4_scales(codes + KT_FP4_TILE + g * KT_STRIP + KT_HALF_ROWS);
      const int lines = 2 * KT_FP4_LINES / KT_NVFP4_TILE_GROUPS; /* of bf16 */
      for (int p = g * lines; p < (g + 1) * lines; p++) {
        __m512i line0, line1;
        const __m512i line = _mm512_loadu_si512(codes + p / 2 * KT_LINE);
        kt_fp4_decode(table, line, p % 2, &line0, &line1);
        _mm512_store_si512(out + p * KT_LINE, scaled_line(line0, scale0));
        _mm512_store_si512(out + KT_BF16_HALF_TILE + p * KT_LINE, scaled_line(line1, scale1));
      }
    }
}

void kt_nvfp4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_fp4_form form = {KT_NVFP4_TILE, KT_NVFP4_TILE_GROUPS, scales_of};
  (void)panel;
  kt_fp4_product(form, w, 0, strip, strips, x, stride, tokens, out);
  kt_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
