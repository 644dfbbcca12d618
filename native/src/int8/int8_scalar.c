/* The rules of INT8 for one row: its scale and its place in the packed bytes. */
#include "../quantize/rounding.h"
#include "int8.h"

float kt_int8_scale(float amax) {
  const uint32_t reciprocal_of_127 = 0x3c010204u; /* fl32(1/127) */
  return kt_flush(kt_flush(amax) * kt_float(reciprocal_of_127));
}

/* Where group 0 of row n is in the tile that starts at column k. */
static int64_t row_at(int64_t rows, int64_t cols, int64_t n, int64_t k) {
  return kt_tile_start(rows, cols, KT_INT8_BLOCK_ROWS, n, k) + kt_half_tile(n) + n % 16 * 4;
}

void kt_int8_pack_row(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  for (int64_t k = 0; k < cols; k += KT_INT8_TILE_COLS) {
    uint8_t *const to = packed + row_at(rows, cols, n, k);
    for (int g = 0; g < 16; g++) memcpy(to + g * KT_GROUP_STRIDE, codes + k + 4 * g, 4);
  }
}

void kt_int8_unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                        int8_t *codes) {
  for (int64_t k = 0; k < cols; k += KT_INT8_TILE_COLS) {
    const uint8_t *const from = packed + row_at(rows, cols, n, k);
    for (int g = 0; g < 16; g++) memcpy(codes + k + 4 * g, from + g * KT_GROUP_STRIDE, 4);
  }
}
