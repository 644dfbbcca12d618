/* Products with integers in groups of columns: the reference. */
#include "group_gemm.h"

#include <math.h>

static float product(const kt_weight *w, int64_t n, const int8_t *codes, const uint8_t *row) {
  const int64_t group = w->layout.group;
  const float *const x_scale = kt_group_x_scale(row, w->cols);
  const int8_t *const x = (const int8_t *)row;
  float total = 0.0f;
  for (int64_t g = 0; g < w->cols / group; g++) {
    int32_t sum = 0;
    for (int64_t k = g * group; k < (g + 1) * group; k++) sum += codes[k] * x[k];
    total = fmaf((float)sum, (float)kt_group_scale(w, n, g) * x_scale[g], total);
  }
  return total;
}

void kt_group_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_group_codes_fn *const codes_of = kt_format_of(&w->layout)->codes_of;
  int8_t *const codes = (int8_t *)panel;
  for (int64_t i = 0; i < strips * KT_STRIP; i++) {
    codes_of(w, strip * KT_STRIP + i, codes);
    for (int64_t t = 0; t < tokens; t++)
      out[(i / KT_STRIP * tokens + t) * KT_STRIP + i % KT_STRIP] =
          product(w, strip * KT_STRIP + i, codes, x + t * stride);
  }
}
