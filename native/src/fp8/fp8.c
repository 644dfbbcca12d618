/* The table row of FP8 weights, their packing and scalar product. */
#include "fp8.h"

#include "../cpu.h"

#include <math.h>
#include <string.h>

/* Normal numbers: exponent bias 7 becomes 127, three bits of mantissa become seven. */
#define NORMAL(m) ((m) * 16 + 120 * 128)
#define NORMAL8(m)                                                                                 \
  NORMAL(m), NORMAL(m + 1), NORMAL(m + 2), NORMAL(m + 3), NORMAL(m + 4), NORMAL(m + 5),            \
      NORMAL(m + 6), NORMAL(m + 7)

const uint16_t kt_fp8_bf16[128] = {
    0,           0x3b00,      0x3b80,      0x3bc0,      0x3c00,      0x3c20,       0x3c40,
    0x3c60, /* m * 2^-9 */
    NORMAL8(8),  NORMAL8(16), NORMAL8(24), NORMAL8(32), NORMAL8(40), NORMAL8(48),  NORMAL8(56),
    NORMAL8(64), NORMAL8(72), NORMAL8(80), NORMAL8(88), NORMAL8(96), NORMAL8(104), NORMAL8(112),
    NORMAL(120), NORMAL(121), NORMAL(122), NORMAL(123), NORMAL(124), NORMAL(125),  NORMAL(126),
    0x7fc0};

static int steps(const kt_layout *layout, int64_t *rows_step, int64_t *cols_step) {
  *rows_step = KT_STRIP;
  *cols_step = layout->group ? KT_FP8_BLOCK : 64;
  return (layout->group == 0 || layout->group == KT_FP8_BLOCK) &&
         layout->scale_dtype == KT_SCALE_F32;
}

static size_t codes_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout;
  return (size_t)(rows * cols);
}

/* Per block: [strips][blocks of columns], one number for all rows of a strip. */
static size_t scale_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  const int64_t count = layout->group ? rows / KT_STRIP * (cols / KT_FP8_BLOCK) : rows;
  return (size_t)count * sizeof(float);
}

static int64_t byte_at(int64_t cols, int64_t n, int64_t k) {
  const int64_t r = n % KT_STRIP;
  return kt_bf16_tile_start(cols, KT_FP8_TILE, n, k) + k % KT_TILE_COLS / 2 * KT_LINE +
         r % KT_HALF_ROWS / 4 * 16 + r / KT_HALF_ROWS * 8 + r % 4 * 2 + k % 2;
}

static kt_status pack_scale(const kt_layout *layout, int64_t rows, int64_t cols, const float *scale,
                            float *packed) {
  const int64_t blocks = layout->group ? cols / KT_FP8_BLOCK : 1;
  const int64_t count = layout->group ? rows / KT_STRIP : rows;
  for (int64_t i = 0; i < count; i++)
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t row = layout->group ? i * KT_STRIP / KT_FP8_BLOCK : i;
      if (!isfinite(scale[row * blocks + b])) return KT_ERR_NONFINITE;
      packed[i * blocks + b] = scale[row * blocks + b];
    }
  return KT_OK;
}

static kt_status pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                      const void *scale, uint8_t *packed, void *packed_scale) {
  const uint8_t *from = codes;
  for (int64_t n = 0; n < rows; n++)
    for (int64_t k = 0; k < cols; k++, from++) {
      if ((*from & 0x7f) == 0x7f) return KT_ERR_NONFINITE;
      packed[byte_at(cols, n, k)] = *from;
    }
  return pack_scale(layout, rows, cols, scale, packed_scale);
}

static double scale_of(const kt_weight *w, int64_t n, int64_t k) {
  const float *const scale = w->scale;
  if (!w->layout.group) return scale[n];
  return scale[n / KT_STRIP * (w->cols / KT_FP8_BLOCK) + k / KT_FP8_BLOCK];
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k++) {
    const uint8_t code = w->codes[byte_at(w->cols, n, k)];
    const double magnitude = kt_bf16_value(kt_fp8_bf16[code & 0x7f]);
    out[k] = (code & 0x80 ? -magnitude : magnitude) * scale_of(w, n, k);
  }
}

void kt_fp8_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_bf16_product_rows(decode_row, w, strip, strips, x, stride, tokens, out, panel);
}

const kt_gemm kt_fp8_gemm = {
    .rows_kind = KT_ROWS_BF16,
    .steps = steps,
    .codes_size = codes_size,
    .scale_size = scale_size,
    .pack = pack,
    .product[KT_ISA_SCALAR] = kt_fp8_product_scalar,
#if KT_X86
    .product[KT_ISA_AVX512_VBMI] = kt_fp8_product_avx512,
    .product[KT_ISA_AMX] = kt_fp8_product_amx,
#endif
};
