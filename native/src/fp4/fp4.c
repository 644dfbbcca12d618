/* E2M1 codes, and where tiles have them. */
#include "fp4.h"

#include <string.h>

const uint16_t kt_fp4_bf16[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                  0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

void kt_fp4_unpack_row(const uint8_t *tile, int64_t n, uint8_t *codes) {
  for (int64_t k = 0; k < KT_TILE_COLS; k++) {
    const unsigned code = kt_fp4_code_at(tile, n, k);
    codes[k / 2] = (uint8_t)(k % 2 ? codes[k / 2] | code << 4 : code);
  }
}

/* A word has four columns of a row and of the one 16 rows below. */
void kt_fp4_pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  for (int r = 0; r < KT_HALF_ROWS; r++, codes += row_size) {
    uint16_t rows[2][KT_FP4_LINES];
    memcpy(rows[0], codes, sizeof rows[0]);
    memcpy(rows[1], codes + KT_HALF_ROWS * row_size, sizeof rows[1]);
    for (int line = 0; line < KT_FP4_LINES; line++) {
      const uint32_t low = rows[0][line], high = rows[1][line];
      const uint32_t word = (low & 0x0f0f) | (high & 0x0f0f) << 4 | (low >> 4 & 0x0f0f) << 16 |
                            (high >> 4 & 0x0f0f) << 20;
      memcpy(tile + line * KT_LINE + r * 4, &word, sizeof word);
    }
  }
}
