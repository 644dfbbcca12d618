/* MXFP4 and NVFP4 products with AVX-512 BF16 (fp4_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/row_scales_avx512.h"
#include "fp4_scales_avx512.h"
#include "fp4_tiles_avx512.h"

/* ---- MXFP4 ------------------------------------------------------------------- */

void kt_mxfp4_decode_scales(const kt_weight *w, int64_t first, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(out + i, kt_mxfp4_scales(w->layout.scale_dtype, w->scale, first + i));
}

KT_INLINE __m512 mxfp4_scales(const kt_fp4_columns *w, const uint8_t *tile, int64_t group,
                              int row) {
  (void)tile;
  return kt_mxfp4_scales(w->scale_dtype, w->scale, group * KT_STRIP + row);
}

void kt_mxfp4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_fp4_form form = {KT_FP4_TILE, 1, mxfp4_scales};
  const int64_t scale_size = w->layout.scale_dtype == KT_SCALE_BF16 ? 2 : 1;
  (void)panel;
  kt_fp4_product(form, w, scale_size * KT_STRIP, strip, strips, x, stride, tokens, out);
}

/* ---- NVFP4 ------------------------------------------------------------------- */

void kt_nvfp4_decode_tiles(const uint8_t *codes, int64_t tiles, uint8_t *out) {
  for (int64_t i = 0; i < tiles; i++, codes += KT_NVFP4_TILE, out += KT_BF16_TILE)
    for (int part = 0; part < 4; part++) kt_nvfp4_decode_part(codes, part, out);
}

KT_INLINE __m512 nvfp4_scales(const kt_fp4_columns *w, const uint8_t *tile, int64_t group,
                              int row) {
  (void)w;
  return kt_nvfp4_scales(tile + KT_FP4_TILE + group % KT_NVFP4_TILE_GROUPS * KT_STRIP + row);
}

/* Sums of 16 columns are multiplied by their E4M3 scale, the sum of a row by its own, last. */
void kt_nvfp4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_fp4_form form = {KT_NVFP4_TILE, KT_NVFP4_TILE_GROUPS, nvfp4_scales};
  (void)panel;
  kt_fp4_product(form, w, 0, strip, strips, x, stride, tokens, out);
  kt_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
