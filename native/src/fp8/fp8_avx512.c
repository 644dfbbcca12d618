/* FP8 and MXFP8 products with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/powers_avx512.h"
#include "../gemm/row_scales_avx512.h"
#include "fp8_tables_avx512.h"

KT_BF16_MICROS(decoding, KT_FORM_FP8, 0, 1)
KT_BF16_MICROS(keeping, KT_FORM_FP8, 1, KT_BF16_BLOCK / 2)
KT_BF16_MICROS(decoded, KT_FORM_PANEL, 0, KT_BF16_BLOCK / 2)
static const kt_bf16_kernels kernels = {decoding, keeping, decoded, .as_is = 0};

/* The panel holds the decoded lines of a K block and, behind them, the scales of as many strips of
 * a call as there is room for: of one at least. */
enum { SCALES_AT = KT_BF16_K_BLOCK * KT_STRIP * 2, SCALES_ROOM = (KT_PANEL_SIZE - SCALES_AT) / 4 };
_Static_assert(SCALES_ROOM >= KT_MAX_COLS / KT_MXFP8_GROUP * KT_STRIP, "scales of a strip");

/* Scales of groups of columns, [strips][groups][32 rows]. */
typedef void scales_fn(const kt_weight *w, int64_t strip, int64_t strips, float *out);

/* The scale of a strip's block, for each of its rows. */
KT_INLINE void scales_of_blocks(const kt_weight *w, int64_t strip, int64_t strips, float *out) {
  const int64_t blocks = w->cols / KT_FP8_BLOCK;
  const float *const scale = (const float *)w->scale + strip * blocks;
  for (int64_t i = 0; i < strips * blocks; i++, out += KT_STRIP) {
    _mm512_storeu_ps(out, _mm512_set1_ps(scale[i]));
    _mm512_storeu_ps(out + 16, _mm512_set1_ps(scale[i]));
  }
}

/* Packed ones are in the same order. */
KT_INLINE void scales_of_mxfp8(const kt_weight *w, int64_t strip, int64_t strips, float *out) {
  const int64_t count = w->cols / KT_MXFP8_GROUP * KT_STRIP;
  const uint8_t *const scale = (const uint8_t *)w->scale + strip * count;
  for (int64_t i = 0; i < strips * count; i += 16)
    _mm512_storeu_ps(out + i, kt_power_scales(scale + i));
}

/* Scales per `group` columns. */
KT_INLINE void scaled_product(scales_fn *scales_of, const int64_t group,
                              const kt_line_tables *tables, const kt_weight *w, int64_t strip,
                              int64_t strips, const uint8_t *x, int64_t stride, int64_t tokens,
                              float *out, uint8_t *panel) {
  float *const scales = (float *)(void *)(panel + SCALES_AT);
  const int64_t most = SCALES_ROOM / (w->cols / group * KT_STRIP);
  for (int64_t first = 0; first < strips; first += most) {
    const int64_t left = strips - first, count = left < most ? left : most;
    scales_of(w, strip + first, count, scales);
    kt_bf16_product(KT_FORM_FP8, &kernels, tables, w, strip + first, count, group, scales, x,
                    stride, tokens, out + first * tokens * KT_STRIP, panel);
  }
}

void kt_fp8_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_line_tables tables = kt_fp8_tables();
  if (w->layout.group) {
    scaled_product(scales_of_blocks, KT_FP8_BLOCK, &tables, w, strip, strips, x, stride, tokens,
                   out, panel);
    return;
  }
  kt_bf16_product(KT_FORM_FP8, &kernels, &tables, w, strip, strips, w->cols, NULL, x, stride,
                  tokens, out, panel);
  kt_scale_rows(w, strip, strips, tokens, out);
}

void kt_mxfp8_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_line_tables tables = kt_fp8_tables();
  scaled_product(scales_of_mxfp8, KT_MXFP8_GROUP, &tables, w, strip, strips, x, stride, tokens, out,
                 panel);
}

KT_TARGET_END
#endif
