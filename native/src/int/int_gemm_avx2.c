/* INT8 and INT4 products with AVX2 (gemm/int_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/int_gemm_avx2.h"
#include "int.h"

KT_INLINE kt_int_segment int8_segment(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t tile = k / KT_INT8_TILE_COLS * KT_INT8_TILE_COLS;
  const int64_t at = kt_tile_start(w->rows, w->cols, KT_INT8_BLOCK_ROWS, n, tile) +
                     kt_half_tile(n) + (k - tile) / 4 * KT_GROUP_STRIDE;
  return (kt_int_segment){w->codes + at, KT_GROUP_STRIDE, 0};
}

void kt_int8_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_int_form form = {8, 0, 0};
  (void)panel;
  kt_int_product_avx2(form, int8_segment, w, strip, strips, x, stride, tokens, out);
}

/* Of a tile, columns 0..63 are in the low nibbles. */
KT_INLINE kt_int_segment int4_segment(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t tile = k / KT_INT4_TILE_COLS * KT_INT4_TILE_COLS, half = KT_INT4_TILE_COLS / 2;
  const int64_t at = kt_tile_start(w->rows, w->cols, KT_INT4_BLOCK_ROWS, n, tile) / 2 +
                     kt_half_tile(n) + (k - tile) % half / 4 * KT_GROUP_STRIDE;
  return (kt_int_segment){w->codes + at, KT_GROUP_STRIDE, k - tile < half ? 0 : 4};
}

void kt_int4_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_int_form form = {4, 8, 0};
  (void)panel;
  kt_int_product_avx2(form, int4_segment, w, strip, strips, x, stride, tokens, out);
}

KT_TARGET_END
#endif
