/* int_tiles.h - the geometry that KTransformers' INT8 and INT4 share.
 *
 * Rows are cut into blocks of `block_rows`, each row block into column blocks of 3584,
 * each of those into strips of 32 rows, each strip into tiles of 2048 bytes. A tile is
 * two half tiles of 16 rows x 64 bytes whose 32-bit words are transposed: word (row r,
 * group g) of the half tile is at byte g*64 + r*4.
 *
 *        columns ->    kb=0 (3584)       kb=3584 (rest)
 *   nb=0            [ tile tile .. ]   [ tile .. ]   strip rows 0..31
 *                   [ tile tile .. ]   [ tile .. ]   strip rows 32..63
 *   nb=block_rows   ...                                                             */
#ifndef KT_INT_TILES_H
#define KT_INT_TILES_H

#include <stdint.h>

enum { KT_ROWS_STEP = 32, KT_COL_BLOCK = 3584, KT_HALF_TILE = 1024, KT_GROUP_STRIDE = 64 };

/* Codes (not bytes) before the tile that holds rows n.. of its strip from column k on;
 * k is a multiple of the tile width. */
static inline int64_t kt_tile_start(int64_t rows, int64_t cols, int64_t block_rows, int64_t n,
                                    int64_t k) {
  const int64_t nb = n / block_rows * block_rows, kb = k / KT_COL_BLOCK * KT_COL_BLOCK;
  const int64_t ns = rows - nb < block_rows ? rows - nb : block_rows;
  const int64_t ks = cols - kb < KT_COL_BLOCK ? cols - kb : KT_COL_BLOCK;
  const int64_t n1 = (n - nb) / KT_ROWS_STEP * KT_ROWS_STEP;
  return nb * cols + kb * ns + n1 * ks + (k - kb) * KT_ROWS_STEP;
}

/* Bytes from the start of its tile to the half tile of row n. */
static inline int64_t kt_half_tile(int64_t n) { return n % KT_ROWS_STEP / 16 * KT_HALF_TILE; }

#endif
