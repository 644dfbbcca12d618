/* The table row of BF16 weights, their packing and their numbers. */
#include "bf16.h"

#include <string.h>

/* Bytes before columns k and k+1 (k even) of row n. */
static int64_t pair_at(int64_t cols, int64_t n, int64_t k) {
  return kt_half_tile_start(cols, KT_BF16_HALF_TILE, n, k) + k % KT_TILE_COLS / 2 * KT_LINE +
         n % KT_HALF_ROWS * 4;
}

static void pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  for (int r = 0; r < KT_STRIP; r++, codes += row_size) {
    uint8_t *const to = tile + r / KT_HALF_ROWS * KT_BF16_HALF_TILE + r % KT_HALF_ROWS * 4;
    for (int pair = 0; pair < KT_TILE_COLS / 2; pair++)
      memcpy(to + pair * KT_LINE, codes + 4 * pair, 4);
  }
}

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  (void)rows;
  for (int64_t k = 0; k < cols; k += 2) memcpy(codes + 2 * k, packed + pair_at(cols, n, k), 4);
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k += 2) {
    uint16_t pair[2];
    memcpy(pair, w->codes + pair_at(w->cols, n, k), sizeof pair);
    out[k] = kt_bf16_value(pair[0]);
    out[k + 1] = kt_bf16_value(pair[1]);
  }
}

static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  uint16_t bits;
  memcpy(&bits, w->codes + pair_at(w->cols, n, k) + k % 2 * 2, sizeof bits);
  return bits;
}

const kt_weight_format kt_bf16_format = {
    .bits = 16,
    .plain_bits = 16,
    .col_multiple = KT_TILE_COLS,
    .group_count = 1,
    .groups = {0},
    .scale_dtypes = 1u << KT_SCALE_NONE,
    .scale_units = 1,
    .unpack_row = unpack_row,
    .pack_tile = pack_tile,
    .decode_row = decode_row,
    .number = number,
    .least_tokens = {1},
    KT_BF16_CELLS(bf16),
};
