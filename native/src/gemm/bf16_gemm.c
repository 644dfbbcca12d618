/* The scalar product with bf16 activations, and scales per group of columns. */
#include "bf16_gemm.h"

#include <math.h>
#include <string.h>

static double dot(const double *w, const uint8_t *x, int64_t cols) {
  double sum = 0.0;
  for (int64_t k = 0; k < cols; k++) {
    uint16_t bits;
    memcpy(&bits, x + 2 * k, sizeof bits);
    sum += w[k] * kt_bf16_value(bits);
  }
  return sum;
}

void kt_bf16_product_rows(kt_decode_row_fn *decode_row, const kt_weight *w, int64_t strip,
                          int64_t strips, const uint8_t *x, int64_t stride, int64_t tokens,
                          float *out, uint8_t *panel) {
  double *const row = (double *)(void *)panel;
  for (int64_t i = 0; i < strips * KT_STRIP; i++) {
    decode_row(w, strip * KT_STRIP + i, row);
    for (int64_t t = 0; t < tokens; t++)
      out[(i / KT_STRIP * tokens + t) * KT_STRIP + i % KT_STRIP] =
          (float)dot(row, x + t * stride, w->cols);
  }
}

static size_t scale_bytes(int32_t dtype) {
  return dtype == KT_SCALE_F32 ? 4 : dtype == KT_SCALE_BF16 ? 2 : 1;
}

size_t kt_group_scale_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  return (size_t)(rows * (cols / layout->group)) * scale_bytes(layout->scale_dtype);
}

static double scale_at(int32_t dtype, const void *scale, int64_t i) {
  if (dtype == KT_SCALE_F32) return ((const float *)scale)[i];
  if (dtype == KT_SCALE_BF16) return kt_bf16_value(((const uint16_t *)scale)[i]);
  const uint8_t code = ((const uint8_t *)scale)[i];
  return code == 255 ? NAN : kt_ue8m0_value(code);
}

double kt_group_scale(const kt_weight *w, int64_t n, int64_t g) {
  return scale_at(w->layout.scale_dtype, w->scale,
                  kt_group_scale_index(w->cols, w->layout.group, n, g));
}

kt_status kt_group_scale_pack(const kt_layout *layout, int64_t rows, int64_t cols,
                              const void *scale, void *packed) {
  const int64_t groups = cols / layout->group;
  const size_t size = scale_bytes(layout->scale_dtype);
  for (int64_t n = 0; n < rows; n++)
    for (int64_t g = 0; g < groups; g++) {
      if (!isfinite(scale_at(layout->scale_dtype, scale, n * groups + g))) return KT_ERR_NONFINITE;
      memcpy((uint8_t *)packed + (size_t)kt_group_scale_index(cols, layout->group, n, g) * size,
             (const uint8_t *)scale + (size_t)(n * groups + g) * size, size);
    }
  return KT_OK;
}
