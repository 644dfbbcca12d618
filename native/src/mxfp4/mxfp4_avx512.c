/* MXFP4 products with AVX-512 BF16 (fp4_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/fp4_gemm_avx512.h"
#include "mxfp4.h"
#include "mxfp4_scales_avx512.h"

KT_INLINE __m512 scales_of(const kt_fp4_columns *w, const uint8_t *tile, int64_t group, int row) {
  (void)tile;
  return kt_mxfp4_scales(w->scale_dtype, w->scale, group * KT_STRIP + row);
}

/* What scales of 16 rows add to bf16 bits: (code - 127) << 7, twice for each row. */
KT_INLINE __m512i exponents_of(const uint8_t *scale) {
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)scale);
  const __m512i steps = _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(127));
  const __m512i high = _mm512_slli_epi32(steps, 23);
  return _mm512_or_si512(high, _mm512_srli_epi32(high, 16));
}

/* Zeros stay as they are. */
KT_INLINE __m512i scaled_line(__m512i line, __m512i exponents) {
  const __mmask32 nonzero = _mm512_test_epi16_mask(line, _mm512_set1_epi16(0x7fff));
  return _mm512_mask_add_epi16(line, nonzero, line, exponents);
}

void kt_mxfp4_decode_tiles(const uint8_t *codes, const uint8_t *exponents, int64_t tiles,
                           uint8_t *out) {
  const __m512i table = kt_fp4_table();
  __m512i add0 = _mm512_setzero_si512(), add1 = add0;
  for (int64_t i = 0; i < tiles; i++, out += KT_BF16_TILE) {
    if (exponents) {
      add0 = exponents_of(exponents + i * KT_STRIP);
      add1 = exponents_of(exponents + i * KT_STRIP + 16);
    }
    for (int p = 0; p < 2 * KT_FP4_LINES; p++) {
      __m512i line0, line1;
      const __m512i line = _mm512_loadu_si512(codes + i * KT_FP4_TILE + p / 2 * KT_LINE);
      kt_fp4_decode(table, line, p % 2, &line0, &line1);
      _mm512_store_si512(out + p * KT_LINE, scaled_line(line0, add0));
      _mm512_store_si512(out + KT_BF16_HALF_TILE + p * KT_LINE, scaled_line(line1, add1));
    }
  }
}

void kt_mxfp4_decode_scales(const kt_weight *w, int64_t first, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(out + i, kt_mxfp4_scales(w->layout.scale_dtype, w->scale, first + i));
}

void kt_mxfp4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_fp4_form form = {KT_FP4_TILE, 1, scales_of};
  const int64_t scale_size = w->layout.scale_dtype == KT_SCALE_BF16 ? 2 : 1;
  (void)panel;
  kt_fp4_product(form, w, scale_size * KT_STRIP, strip, strips, x, stride, tokens, out);
}

KT_TARGET_END
#endif
