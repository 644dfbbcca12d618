/* The table row of group INT8 weights, their packing and their codes. */
#include "group.h"

#include "../cpu.h"
#include "../quantize/rows.h"
#include "../simd/bits.h"

#include <string.h>

/* Where the four columns from k on of row n are; k % 4 == 0. */
static int64_t byte_at(int64_t cols, int64_t n, int64_t k) {
  return kt_bf16_tile_start(cols, KT_GINT8_TILE, n, k) + k % KT_TILE_COLS / 4 * 2 * KT_LINE +
         n % KT_STRIP / KT_HALF_ROWS * KT_LINE + n % KT_HALF_ROWS * 4;
}

static void pack_row(const uint8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  (void)rows;
  for (int64_t k = 0; k < cols; k += 4) memcpy(packed + byte_at(cols, n, k), codes + k, 4);
}

static void pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  for (int r = 0; r < KT_STRIP; r++, codes += row_size) {
    uint8_t *const to = tile + r / KT_HALF_ROWS * KT_LINE + r % KT_HALF_ROWS * 4;
    for (int p = 0; p < KT_TILE_COLS / 4; p++) memcpy(to + p * 2 * KT_LINE, codes + 4 * p, 4);
  }
}

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  (void)rows;
  for (int64_t k = 0; k < cols; k += 4) memcpy(codes + k, packed + byte_at(cols, n, k), 4);
}

static int code_at(const kt_weight *w, int64_t n, int64_t k) {
  return w->codes[byte_at(w->cols, n, k / 4 * 4) + k % 4] - KT_GINT8_BIAS;
}

static void codes_of(const kt_weight *w, int64_t n, int8_t *codes) {
  for (int64_t k = 0; k < w->cols; k++) codes[k] = (int8_t)code_at(w, n, k);
}

static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  return kt_bf16_bits((float)code_at(w, n, k));
}

const kt_weight_format kt_gint8_format = {
    .bits = 8,
    .plain_bits = 8,
    .col_multiple = KT_TILE_COLS,
    .group_count = 3,
    .groups = {32, 64, 128},
    .scale_dtypes = 1u << KT_SCALE_F32 | 1u << KT_SCALE_BF16,
    .scale_rows = 1,
    .pack_row = pack_row,
    .unpack_row = unpack_row,
    .pack_tile = pack_tile,
    .max_level = 127,
    .scale_units = 1,
    .code_bias = KT_GINT8_BIAS,
    .scale = kt_scale_to_127,
    .quantize_pack[KT_ISA_SCALAR] = kt_quantize_pack_rows,
    .rows_kind = KT_ROWS_GROUP,
    .codes_of = codes_of,
    .number = number,
    .product[KT_ISA_SCALAR] = kt_group_product_scalar,
    .transpose[KT_ISA_SCALAR] = kt_transpose_scalar,
#if KT_X86
    .product[KT_ISA_AVX512_VNNI] = kt_gint8_product_avx512,
    .product[KT_ISA_AVX2] = kt_gint8_product_avx2,
    .product[KT_ISA_AMX] = kt_gint8_product_amx,
    .stream[KT_ISA_AMX] = kt_gint8_stream_amx,
    .least_tokens = {2, 2, 2},
    .transposed = kt_gint8_transposed_amx,
    .rounded = &kt_gint8_rounded_amx,
#endif
};
