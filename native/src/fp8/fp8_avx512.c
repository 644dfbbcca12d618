/* FP8 products with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/row_scales_avx512.h"
#include "fp8_tables_avx512.h"

KT_BF16_MICROS(decoding, KT_FORM_FP8, 0, 1)
KT_BF16_MICROS(keeping, KT_FORM_FP8, 1, KT_BF16_BLOCK / 2)
KT_BF16_MICROS(decoded, KT_FORM_PANEL, 0, KT_BF16_BLOCK / 2)
static const kt_bf16_kernels kernels = {decoding, keeping, decoded, .as_is = 0};

/* The panel holds the decoded lines of a K block and, behind them, the scales of a call: room
 * for as many columns as gemm.c lets pass. */
enum { SCALED_STRIPS = 4 };
_Static_assert(KT_BF16_K_BLOCK * KT_STRIP * 2 +
                       SCALED_STRIPS * KT_STRIP * 4 * (KT_PANEL_SIZE / 8 / KT_FP8_BLOCK) <=
                   KT_PANEL_SIZE,
               "scales of a call lie in the panel");

/* The scale of a strip's block, for each of its rows. */
static void spread_scales(const kt_weight *w, int64_t strip, int64_t strips, float *out) {
  const int64_t blocks = w->cols / KT_FP8_BLOCK;
  const float *const scale = (const float *)w->scale + strip * blocks;
  for (int64_t i = 0; i < strips * blocks; i++, out += KT_STRIP) {
    _mm512_storeu_ps(out, _mm512_set1_ps(scale[i]));
    _mm512_storeu_ps(out + 16, _mm512_set1_ps(scale[i]));
  }
}

/* Scales per block of 128 x 128. */
static void scaled_product(const kt_line_tables *tables, const kt_weight *w, int64_t strip,
                           int64_t strips, const uint8_t *x, int64_t stride, int64_t tokens,
                           float *out, uint8_t *panel) {
  float *const scales = (float *)(void *)(panel + KT_STRIP * KT_BF16_K_BLOCK * 2);
  for (int64_t first = 0; first < strips; first += SCALED_STRIPS) {
    const int64_t left = strips - first, count = left < SCALED_STRIPS ? left : SCALED_STRIPS;
    spread_scales(w, strip + first, count, scales);
    kt_bf16_product(KT_FORM_FP8, &kernels, tables, w, strip + first, count, KT_FP8_BLOCK, scales, x,
                    stride, tokens, out + first * tokens * KT_STRIP, panel);
  }
}

void kt_fp8_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_line_tables tables = kt_fp8_tables();
  if (w->layout.group) {
    scaled_product(&tables, w, strip, strips, x, stride, tokens, out, panel);
    return;
  }
  kt_bf16_product(KT_FORM_FP8, &kernels, &tables, w, strip, strips, w->cols, NULL, x, stride,
                  tokens, out, panel);
  kt_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
