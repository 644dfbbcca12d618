/* The table row of FP8 weights, the packing of E4M3 codes, and their numbers. */
#include "fp8.h"

#include <string.h>

static int64_t byte_at(int64_t cols, int64_t n, int64_t k) {
  const int64_t r = n % KT_STRIP;
  return kt_bf16_tile_start(cols, KT_FP8_TILE, n, k) + k % KT_TILE_COLS / 2 * KT_LINE +
         r % KT_HALF_ROWS / 4 * 16 + r / KT_HALF_ROWS * 8 + r % 4 * 2 + k % 2;
}

int kt_fp8_is_finite(const uint8_t *codes, int64_t count) {
  int found = 0;
  for (int64_t i = 0; i < count; i++) found |= (codes[i] & 0x7f) == 0x7f;
  return !found;
}

void kt_fp8_pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  for (int r = 0; r < KT_STRIP; r++, codes += row_size) {
    uint8_t *const to = tile + r % KT_HALF_ROWS / 4 * 16 + r / KT_HALF_ROWS * 8 + r % 4 * 2;
    for (int pair = 0; pair < KT_TILE_COLS / 2; pair++)
      memcpy(to + pair * KT_LINE, codes + 2 * pair, 2);
  }
}

void kt_fp8_unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  (void)rows;
  for (int64_t k = 0; k < cols; k++) codes[k] = packed[byte_at(cols, n, k)];
}

uint16_t kt_fp8_number(const kt_weight *w, int64_t n, int64_t k) {
  const unsigned code = w->codes[byte_at(w->cols, n, k)];
  return (uint16_t)(kt_e4m3_bf16[code & 0x7f] | (code & 0x80) << 8);
}

static double scale_of(const kt_weight *w, int64_t n, int64_t k) {
  const float *const scale = w->scale;
  if (!w->layout.group) return scale[n];
  return scale[n / KT_STRIP * (w->cols / KT_FP8_BLOCK) + k / KT_FP8_BLOCK];
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k++)
    out[k] = kt_bf16_value(kt_fp8_number(w, n, k)) * scale_of(w, n, k);
}

const kt_weight_format kt_fp8_format = {
    .bits = 8,
    .plain_bits = 8,
    .col_multiple = 64,
    .group_count = 2,
    .groups = {0, KT_FP8_BLOCK},
    .scale_dtypes = 1u << KT_SCALE_F32,
    .scale_rows = KT_FP8_BLOCK,
    .scale_units = 1,
    .unpack_row = kt_fp8_unpack_row,
    .pack_tile = kt_fp8_pack_tile,
    .is_finite = kt_fp8_is_finite,
    .decode_row = decode_row,
    .number = kt_fp8_number,
    .least_tokens = {2, 2},
    KT_BF16_CELLS(fp8),
};
