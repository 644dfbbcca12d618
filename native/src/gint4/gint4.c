/* The table row of group INT4 weights, their packing and scalar product. */
#include "gint4.h"

#include "../cpu.h"

#include <math.h>
#include <string.h>

static int steps(const kt_layout *layout, int64_t *rows_step, int64_t *cols_step) {
  *rows_step = KT_STRIP;
  *cols_step = layout->group;
  return (layout->group == 32 || layout->group == 64 || layout->group == 128) &&
         (layout->scale_dtype == KT_SCALE_F32 || layout->scale_dtype == KT_SCALE_BF16);
}

static size_t codes_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout;
  return (size_t)(rows * cols / 2);
}

/* The byte of (row n, column k) and by how much its nibble is shifted. */
static int64_t nibble_at(int64_t cols, int64_t n, int64_t k, int *shift) {
  *shift = (int)(n % KT_STRIP / KT_HALF_ROWS * 4);
  return kt_bf16_tile_start(cols, KT_GINT4_TILE, n, k) + k % KT_TILE_COLS / 4 * KT_LINE +
         n % KT_HALF_ROWS * 4 + k % 4;
}

static kt_status pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                      const void *scale, uint8_t *packed, void *packed_scale) {
  const uint8_t *const from = codes;
  memset(packed, 0, codes_size(layout, rows, cols));
  for (int64_t n = 0; n < rows; n++)
    for (int64_t k = 0; k < cols; k++) {
      int shift;
      const int64_t at = nibble_at(cols, n, k, &shift);
      const int code = from[(n * cols + k) / 2] >> (k % 2 * 4) & 15;
      packed[at] = (uint8_t)(packed[at] | code << shift);
    }
  return kt_group_scale_pack(layout, rows, cols, scale, packed_scale);
}

static void unpack_row(const kt_weight *w, int64_t n, int8_t *codes) {
  for (int64_t k = 0; k < w->cols; k++) {
    int shift;
    const uint8_t byte = w->codes[nibble_at(w->cols, n, k, &shift)];
    codes[k] = (int8_t)((byte >> shift & 15) - KT_GINT4_BIAS);
  }
}

static float product(const kt_weight *w, int64_t n, const int8_t *codes, const uint8_t *row) {
  const int64_t group = w->layout.group;
  const float *const x_scale = kt_gint4_x_scale(row, w->cols);
  const int8_t *const x = (const int8_t *)row;
  float total = 0.0f;
  for (int64_t g = 0; g < w->cols / group; g++) {
    int32_t sum = 0;
    for (int64_t k = g * group; k < (g + 1) * group; k++) sum += codes[k] * x[k];
    total = fmaf((float)sum, (float)kt_group_scale(w, n, g) * x_scale[g], total);
  }
  return total;
}

void kt_gint4_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  int8_t *const codes = (int8_t *)panel;
  for (int64_t i = 0; i < strips * KT_STRIP; i++) {
    unpack_row(w, strip * KT_STRIP + i, codes);
    for (int64_t t = 0; t < tokens; t++)
      out[(i / KT_STRIP * tokens + t) * KT_STRIP + i % KT_STRIP] =
          product(w, strip * KT_STRIP + i, codes, x + t * stride);
  }
}

const kt_gemm kt_gint4_gemm = {
    .rows_kind = KT_ROWS_GROUP,
    .steps = steps,
    .codes_size = codes_size,
    .scale_size = kt_group_scale_size,
    .pack = pack,
    .product[KT_ISA_SCALAR] = kt_gint4_product_scalar,
#if KT_X86
    .product[KT_ISA_AVX512_VNNI] = kt_gint4_product_avx512,
    .product[KT_ISA_AMX] = kt_gint4_product_amx,
#endif
};
