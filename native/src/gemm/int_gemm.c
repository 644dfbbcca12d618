/* Scalar products and packing for KTransformers' layout. */
#include "int_gemm.h"

#include <string.h>

static int32_t dot(const int8_t *a, const int8_t *b, int64_t n) {
  int32_t sum = 0;
  for (int64_t k = 0; k < n; k++) sum += a[k] * b[k];
  return sum;
}

void kt_int_product_rows(kt_unpack_row_fn *unpack_row, float step, const kt_weight *w,
                         int64_t strip, int64_t strips, const uint8_t *x, int64_t stride,
                         int64_t tokens, float *out, uint8_t *panel) {
  int8_t *const codes = (int8_t *)panel;
  for (int64_t i = 0; i < strips * KT_STRIP; i++) {
    const int64_t row = strip * KT_STRIP + i;
    const float scale = step * ((const float *)w->scale)[row];
    unpack_row(w->codes, w->rows, w->cols, row, codes);
    for (int64_t t = 0; t < tokens; t++) {
      const uint8_t *const xt = x + t * stride;
      const float sum = (float)dot(codes, (const int8_t *)xt, w->cols);
      out[(i / KT_STRIP * tokens + t) * KT_STRIP + i % KT_STRIP] =
          sum * scale * kt_int_row_scale(xt, w->cols);
    }
  }
}

kt_status kt_int_gemm_pack(int format, int64_t rows, int64_t cols, const void *codes,
                           const void *scale, uint8_t *packed, void *packed_scale) {
  const float *const values = scale;
  for (int64_t n = 0; n < rows; n++)
    if (!(values[n] - values[n] == 0.0f)) return KT_ERR_NONFINITE;
  memcpy(packed_scale, scale, (size_t)rows * sizeof *values);
  return kt_pack(format, codes, rows, cols, packed);
}

int kt_int_gemm_steps(const kt_layout *layout, int64_t tile_cols, int64_t *rows_step,
                      int64_t *cols_step) {
  *rows_step = KT_STRIP;
  *cols_step = tile_cols;
  return layout->group == 0 && layout->scale_dtype == KT_SCALE_F32;
}
