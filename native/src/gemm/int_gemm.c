/* The scalar product of INT8 and INT4 in KTransformers' layout. */
#include "int_gemm.h"

static int32_t dot(const int8_t *a, const int8_t *b, int64_t n) {
  int32_t sum = 0;
  for (int64_t k = 0; k < n; k++) sum += a[k] * b[k];
  return sum;
}

void kt_int_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_weight_format *format = kt_format_of(&w->layout);
  for (int64_t i = 0; i < strips * KT_STRIP; i++) {
    const int64_t row = strip * KT_STRIP + i;
    const float scale = (float)format->scale_units * ((const float *)w->scale)[row];
    format->unpack_row(w->codes, w->rows, w->cols, row, panel);
    for (int64_t t = 0; t < tokens; t++) {
      const uint8_t *const xt = x + t * stride;
      const float sum = (float)dot((const int8_t *)panel, (const int8_t *)xt, w->cols);
      out[(i / KT_STRIP * tokens + t) * KT_STRIP + i % KT_STRIP] =
          sum * scale * kt_int_row_scale(xt, w->cols);
    }
  }
}
