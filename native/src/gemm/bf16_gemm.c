/* The scalar product with bf16 activations, and the scalar transposition. */
#include "bf16_gemm.h"

#include "../simd/target.h"

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

/* adding: out += it. */
KT_INLINE void product(const int adding, const kt_weight *w, int64_t strip, int64_t strips,
                       const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                       uint8_t *panel) {
  kt_decode_row_fn *const decode_row = kt_format_of(&w->layout)->decode_row;
  double *const row = (double *)(void *)panel;
  for (int64_t i = 0; i < strips * KT_STRIP; i++) {
    decode_row(w, strip * KT_STRIP + i, row);
    for (int64_t t = 0; t < tokens; t++) {
      float *const to = out + (i / KT_STRIP * tokens + t) * KT_STRIP + i % KT_STRIP;
      const float sum = (float)dot(row, x + t * stride, w->cols);
      *to = adding ? *to + sum : sum;
    }
  }
}

void kt_bf16_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                            int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  product(0, w, strip, strips, x, stride, tokens, out, panel);
}

void kt_bf16_adding_product_scalar(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  product(1, w, strip, strips, x, stride, tokens, out, panel);
}

void kt_transpose_scalar(const kt_weight *w, int64_t column, uint8_t *strip) {
  kt_number_fn *const number = kt_format_of(&w->layout)->number;
  for (int64_t n = 0; n < w->rows; n++)
    for (int64_t i = 0; i < KT_STRIP; i++) {
      const uint16_t bits = number(w, n, column + i);
      memcpy(strip + kt_strip_at(i, n), &bits, sizeof bits);
    }
}
