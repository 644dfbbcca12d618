/* The table row of MXFP4 weights, their packing and scalar product. */
#include "mxfp4.h"

#include "../cpu.h"

#include <string.h>

const uint16_t kt_mxfp4_bf16[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

static int steps(const kt_layout *layout, int64_t *rows_step, int64_t *cols_step) {
  *rows_step = KT_STRIP;
  *cols_step = KT_MXFP4_GROUP;
  return layout->group == KT_MXFP4_GROUP &&
         (layout->scale_dtype == KT_SCALE_UE8M0 || layout->scale_dtype == KT_SCALE_BF16);
}

static size_t codes_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout;
  return (size_t)(rows * cols / 2);
}

/* The byte of (row n, column k) and by how much its nibble is shifted. */
static int64_t nibble_at(int64_t cols, int64_t n, int64_t k, int *shift) {
  const int64_t nibble = k % 4 / 2 * 2 + n % KT_STRIP / KT_HALF_ROWS;
  *shift = (int)(nibble % 2 * 4);
  return kt_bf16_tile_start(cols, KT_MXFP4_TILE, n, k) + k % KT_TILE_COLS / 4 * KT_LINE +
         n % KT_HALF_ROWS * 4 + k % 2 * 2 + nibble / 2;
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

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k++) {
    int shift;
    const uint8_t byte = w->codes[nibble_at(w->cols, n, k, &shift)];
    out[k] =
        kt_bf16_value(kt_mxfp4_bf16[byte >> shift & 15]) * kt_group_scale(w, n, k / KT_MXFP4_GROUP);
  }
}

void kt_mxfp4_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_bf16_product_rows(decode_row, w, strip, strips, x, stride, tokens, out, panel);
}

const kt_gemm kt_mxfp4_gemm = {
    .rows_kind = KT_ROWS_BF16,
    .steps = steps,
    .codes_size = codes_size,
    .scale_size = kt_group_scale_size,
    .pack = pack,
    .product[KT_ISA_SCALAR] = kt_mxfp4_product_scalar,
#if KT_X86
    .product[KT_ISA_AVX512_VBMI] = kt_mxfp4_product_avx512,
    .product[KT_ISA_AMX] = kt_mxfp4_product_amx,
#endif
};
