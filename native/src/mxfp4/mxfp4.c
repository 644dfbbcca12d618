/* The table row of MXFP4 weights, their packing and scalar product. */
#include "mxfp4.h"

#include "../cpu.h"
#include "../simd/bits.h"

#include <string.h>

const uint16_t kt_mxfp4_bf16[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

/* The byte of (row n, column k) and by how much its nibble is shifted. */
static int64_t nibble_at(int64_t cols, int64_t n, int64_t k, int *shift) {
  const int64_t nibble = k % 4 / 2 * 2 + n % KT_STRIP / KT_HALF_ROWS;
  *shift = (int)(nibble % 2 * 4);
  return kt_bf16_tile_start(cols, KT_MXFP4_TILE, n, k) + k % KT_TILE_COLS / 4 * KT_LINE +
         n % KT_HALF_ROWS * 4 + k % 2 * 2 + nibble / 2;
}

static void pack_row(const uint8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  (void)rows;
  for (int64_t k = 0; k < cols; k++) {
    int shift;
    uint8_t *const at = packed + nibble_at(cols, n, k, &shift);
    const int code = codes[k / 2] >> (k % 2 * 4) & 15;
    *at = (uint8_t)(shift ? *at | code << 4 : code);
  }
}

/* A word has four columns of a row and of the one 16 rows below. */
static void pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  for (int r = 0; r < KT_HALF_ROWS; r++, codes += row_size) {
    uint16_t rows[2][KT_TILE_COLS / 4];
    memcpy(rows[0], codes, sizeof rows[0]);
    memcpy(rows[1], codes + KT_HALF_ROWS * row_size, sizeof rows[1]);
    for (int line = 0; line < KT_TILE_COLS / 4; line++) {
      const uint32_t low = rows[0][line], high = rows[1][line];
      const uint32_t word = (low & 0x0f0f) | (high & 0x0f0f) << 4 | (low >> 4 & 0x0f0f) << 16 |
                            (high >> 4 & 0x0f0f) << 20;
      memcpy(tile + line * KT_LINE + r * 4, &word, sizeof word);
    }
  }
}

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  (void)rows;
  for (int64_t k = 0; k < cols; k++) {
    int shift;
    const uint8_t byte = packed[nibble_at(cols, n, k, &shift)];
    const int code = byte >> shift & 15;
    codes[k / 2] = (uint8_t)(k % 2 ? codes[k / 2] | code << 4 : code);
  }
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

/* Times the scale, where that is a power of two. Down to 2^-128, the smallest, bf16 has the product
 * (below 2^-126 as a denormal, which VDPBF16PS takes for 0); from 2^128 on it is infinity, as in
 * binary32. */
static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  int shift;
  const uint8_t byte = w->codes[nibble_at(w->cols, n, k, &shift)];
  const uint16_t code = kt_mxfp4_bf16[byte >> shift & 15];
  if (w->layout.scale_dtype != KT_SCALE_UE8M0) return code;
  return kt_bf16_bits((float)(kt_bf16_value(code) * kt_group_scale(w, n, k / KT_MXFP4_GROUP)));
}

void kt_mxfp4_transpose_scalar(const kt_weight *w, int64_t column, uint8_t *strip) {
  kt_transpose_numbers(number, w, column, strip);
}

const kt_weight_format kt_mxfp4_format = {
    .bits = 4,
    .plain_bits = 4,
    .col_multiple = KT_TILE_COLS,
    .group_count = 1,
    .groups = {KT_MXFP4_GROUP},
    .scale_dtypes = 1u << KT_SCALE_UE8M0 | 1u << KT_SCALE_BF16,
    .scale_rows = 1,
    .pack_row = pack_row,
    .unpack_row = unpack_row,
    .pack_tile = pack_tile,
    .scale_units = 1,
    .rows_kind = KT_ROWS_BF16,
    .product[KT_ISA_SCALAR] = kt_mxfp4_product_scalar,
    .transpose[KT_ISA_SCALAR] = kt_mxfp4_transpose_scalar,
    .scaled_strips = 1u << KT_SCALE_UE8M0,
#if KT_X86
    .transpose[KT_ISA_AVX512_VBMI] = kt_mxfp4_transpose_avx512,
    .product[KT_ISA_AVX512_VBMI] = kt_mxfp4_product_avx512,
    .product[KT_ISA_AMX] = kt_mxfp4_product_amx,
#endif
};
