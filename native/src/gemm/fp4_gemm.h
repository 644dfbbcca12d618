/* fp4_gemm.h - what formats of E2M1 codes share.
 *
 * A packed line is 32 rows x 4 columns, as 16-bit words. Word 2r + c has column c of row r in
 * nibble 0, of row r + 16 in nibble 1, and column c + 2 of the two in nibbles 2 and 3: shifted
 * right by 4j, all are the low nibbles of words, which one VPERMW turns into a line of bf16. A tile
 * of 32 columns is 8 lines; a format may have something behind them. */
#ifndef KT_FP4_GEMM_H
#define KT_FP4_GEMM_H

#include "bf16_gemm.h"

enum { KT_FP4_LINES = 8, KT_FP4_LINE_COLS = 4, KT_FP4_TILE = KT_FP4_LINES * KT_LINE };

/* bf16 bits of the 16 codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. */
extern const uint16_t kt_fp4_bf16[16];

/* The byte of a tile with (row n, column k) of the matrix, and by how much its nibble is shifted.
 */
static inline int64_t kt_fp4_nibble_at(int64_t n, int64_t k, int *shift) {
  const int64_t nibble = k % 4 / 2 * 2 + n % KT_STRIP / KT_HALF_ROWS;
  *shift = (int)(nibble % 2 * 4);
  return k % KT_TILE_COLS / 4 * KT_LINE + n % KT_HALF_ROWS * 4 + k % 2 * 2 + nibble / 2;
}

/* The code of (row n, column k) in its tile. */
static inline unsigned kt_fp4_code_at(const uint8_t *tile, int64_t n, int64_t k) {
  int shift;
  const int64_t at = kt_fp4_nibble_at(n, k, &shift);
  return tile[at] >> shift & 15u;
}

/* 32 codes of row n of a tile, two in a byte, the even column in the low nibble. */
void kt_fp4_unpack_row(const uint8_t *tile, int64_t n, uint8_t *codes);

/* The reverse for 32 rows, `row_size` bytes apart. */
void kt_fp4_pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile);

#endif
