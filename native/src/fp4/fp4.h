/* fp4.h - MXFP4 and NVFP4: E2M1 codes with scales of groups of columns.
 *
 *   MXFP4   a scale per 32 columns of a row, in a matrix of their own (OCP Microscaling)
 *   NVFP4   an E4M3 scale per 16 columns of a row, times a float per row
 *
 * A packed line is 32 rows x 4 columns, as 16-bit words. Word 2r + c has column c of row r in
 * nibble 0, of row r + 16 in nibble 1, and column c + 2 of the two in nibbles 2 and 3: shifted
 * right by 4j, all are the low nibbles of words, which one VPERMW turns into a line of bf16. A tile
 * of 32 columns is 8 lines. One of NVFP4 goes on with the E4M3 scales of rows 0..31 for columns
 * 0..15, then those for columns 16..31. E2M1 times E4M3 has at most 6 significant bits: bf16 has it
 * exactly. */
#ifndef KT_FP4_H
#define KT_FP4_H

#include "../gemm/bf16_gemm.h"

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

/* ---- MXFP4 ------------------------------------------------------------------- */

enum { KT_MXFP4_GROUP = 32 };

KT_BF16_KERNELS(mxfp4);

/* UE8M0 scales, whose products with all codes bf16 holds: 0.5 * 2^-125 is the smallest normal
 * number, 6 * 2^125 finite. */
enum { KT_MXFP4_EXACT_FIRST = 2, KT_MXFP4_EXACT_LAST = 252 };

/* `count` packed scales (a multiple of 16), from scale `first` on, as binary32. */
void kt_mxfp4_decode_scales(const kt_weight *w, int64_t first, int64_t count, float *out);

/* ---- NVFP4 ------------------------------------------------------------------- */

enum {
  KT_NVFP4_GROUP = 16,
  KT_NVFP4_TILE_GROUPS = KT_TILE_COLS / KT_NVFP4_GROUP,
  KT_NVFP4_TILE = KT_FP4_TILE + KT_NVFP4_TILE_GROUPS * KT_STRIP,
  KT_NVFP4_PLAIN = KT_TILE_COLS / 2 + KT_NVFP4_TILE_GROUPS /* bytes of a row's 32 columns */
};

KT_BF16_KERNELS(nvfp4);

/* Packed tiles, without the scales of rows, as tiles of bf16 (bf16_gemm.h), 64-byte aligned. */
void kt_nvfp4_decode_tiles(const uint8_t *codes, int64_t tiles, uint8_t *out);

#endif
