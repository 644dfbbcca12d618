/* The table row of group INT4 weights, their packing and their codes. */
#include "group.h"

#include "../cpu.h"
#include "../quantize/rounding.h"
#include "../quantize/rows.h"
#include "../simd/bits.h"

#include <string.h>

/* Of a group, from its largest magnitude: amax / 7, computed in binary64. */
static float scale(float amax) { return kt_flush((float)((double)amax / 7.0)); }

/* The byte of (row n, column k) and by how much its nibble is shifted. */
static int64_t nibble_at(int64_t cols, int64_t n, int64_t k, int *shift) {
  *shift = (int)(n % KT_STRIP / KT_HALF_ROWS * 4);
  return kt_bf16_tile_start(cols, KT_GINT4_TILE, n, k) + k % KT_TILE_COLS / 4 * KT_LINE +
         n % KT_HALF_ROWS * 4 + k % 4;
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

/* Four nibbles, each in a byte of its own. */
static uint32_t spread(uint32_t nibbles) {
  const uint32_t pairs = (nibbles | nibbles << 8) & 0x00ff00ff;
  return (pairs | pairs << 4) & 0x0f0f0f0f;
}

/* A word has four columns of a row and of the one 16 rows below. */
static void pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  for (int r = 0; r < KT_HALF_ROWS; r++, codes += row_size) {
    uint16_t rows[2][KT_TILE_COLS / 4];
    memcpy(rows[0], codes, sizeof rows[0]);
    memcpy(rows[1], codes + KT_HALF_ROWS * row_size, sizeof rows[1]);
    for (int line = 0; line < KT_TILE_COLS / 4; line++) {
      const uint32_t low = rows[0][line], high = rows[1][line];
      const uint32_t word = spread(low) | spread(high) << 4;
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

static int code_at(const kt_weight *w, int64_t n, int64_t k) {
  int shift;
  const uint8_t byte = w->codes[nibble_at(w->cols, n, k, &shift)];
  return (byte >> shift & 15) - KT_GINT4_BIAS;
}

static void codes_of(const kt_weight *w, int64_t n, int8_t *codes) {
  for (int64_t k = 0; k < w->cols; k++) codes[k] = (int8_t)code_at(w, n, k);
}

static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  return kt_bf16_bits((float)code_at(w, n, k));
}

const kt_weight_format kt_gint4_format = {
    .bits = 4,
    .plain_bits = 4,
    .col_multiple = KT_TILE_COLS,
    .group_count = 3,
    .groups = {32, 64, 128},
    .scale_dtypes = 1u << KT_SCALE_F32 | 1u << KT_SCALE_BF16,
    .scale_rows = 1,
    .pack_row = pack_row,
    .unpack_row = unpack_row,
    .pack_tile = pack_tile,
    .max_level = 7,
    .scale_units = 1,
    .code_bias = KT_GINT4_BIAS,
    .scale = scale,
    .quantize_pack[KT_ISA_SCALAR] = kt_quantize_pack_rows,
    .rows_kind = KT_ROWS_GROUP,
    .codes_of = codes_of,
    .number = number,
    .product[KT_ISA_SCALAR] = kt_group_product_scalar,
    .transpose[KT_ISA_SCALAR] = kt_transpose_scalar,
#if KT_X86
    .transpose[KT_ISA_AVX512_VBMI] = kt_gint4_transpose_avx512,
    .product[KT_ISA_AVX512_VNNI] = kt_gint4_product_avx512,
    .product[KT_ISA_AVX2] = kt_gint4_product_avx2,
    .product[KT_ISA_AMX] = kt_gint4_product_amx,
    .stream[KT_ISA_AMX] = kt_gint4_stream_amx,
    .least_tokens = {7, 4, 3},
    .transposed = kt_gint4_transposed_amx,
    .rounded = &kt_gint4_rounded_amx,
#endif
};
