/* Group INT4 and INT8 products with AVX2 (gemm/int_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/int_gemm_avx2.h"
#include "group.h"

/* Rows 0..15 of a strip are in the low nibbles. */
KT_INLINE kt_int_segment gint4_segment(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t at = kt_bf16_tile_start(w->cols, KT_GINT4_TILE, n, k);
  return (kt_int_segment){w->codes + at, KT_LINE, n % KT_STRIP ? 4 : 0};
}

void kt_gint4_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_int_form form = {4, 0, 1};
  (void)panel;
  kt_int_product_avx2(form, gint4_segment, w, strip, strips, x, stride, tokens, out);
}

KT_INLINE kt_int_segment gint8_segment(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t at = kt_bf16_tile_start(w->cols, KT_GINT8_TILE, n, k);
  return (kt_int_segment){w->codes + at + n % KT_STRIP / KT_HALF_ROWS * KT_LINE, 2 * KT_LINE, 0};
}

void kt_gint8_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_int_form form = {8, 0x80, 1};
  (void)panel;
  kt_int_product_avx2(form, gint8_segment, w, strip, strips, x, stride, tokens, out);
}

KT_TARGET_END
#endif
