/* The rules of INT4 for one row: its scale and its place in the packed bytes. */
#include "../quantize/rounding.h"
#include "int4.h"

float kt_int4_scale(float amax) { return kt_flush((float)((double)amax / 112.0)); }

/* On 8-bit codes q: nearest multiple of 16, ties away from zero. As a floor: (q+8)/16 for
 * q >= 0 and (q+7)/16 below, made positive by 8*16 first. */
void kt_int4_requantize(int8_t *codes, int64_t cols) {
  for (int64_t k = 0; k < cols; k++)
    codes[k] = (int8_t)(((codes[k] + 8 + 128 - (codes[k] < 0)) >> 4) - 8);
}

/* Where group 0 of row n is in the tile that starts at column k. */
static int64_t row_at(int64_t rows, int64_t cols, int64_t n, int64_t k) {
  return kt_tile_start(rows, cols, KT_INT4_BLOCK_ROWS, n, k) / 2 + kt_half_tile(n) + n % 16 * 4;
}

void kt_int4_pack_row(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  for (int64_t k = 0; k < cols; k += KT_INT4_TILE_COLS) {
    uint8_t *const to = packed + row_at(rows, cols, n, k);
    uint8_t bytes[64];
    for (int j = 0; j < 64; j++)
      bytes[j] = (uint8_t)((codes[k + j] & 0x0f) | (codes[k + j + 64] & 0x0f) << 4);
    for (int g = 0; g < 16; g++) memcpy(to + g * KT_GROUP_STRIDE, bytes + 4 * g, 4);
  }
}

static int8_t sign_extend(uint8_t nibble) { return (int8_t)((nibble ^ 8) - 8); }

void kt_int4_unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                        int8_t *codes) {
  for (int64_t k = 0; k < cols; k += KT_INT4_TILE_COLS) {
    const uint8_t *const from = packed + row_at(rows, cols, n, k);
    uint8_t bytes[64];
    for (int g = 0; g < 16; g++) memcpy(bytes + 4 * g, from + g * KT_GROUP_STRIDE, 4);
    for (int j = 0; j < 64; j++) {
      codes[k + j] = sign_extend(bytes[j] & 0x0f);
      codes[k + j + 64] = sign_extend(bytes[j] >> 4);
    }
  }
}
