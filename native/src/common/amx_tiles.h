/* amx_tiles.h - how all AMX code divides the eight tiles. Include after target_amx.h.
 *
 *   0 1     sums: tile 2i + j holds 16 tokens (i) x 16 rows of w (j), 32-bit
 *   2 3
 *   4 5     activations: 16 tokens x 64 bytes of columns
 *   6 7     weights: a half tile, 16 groups of 4 bytes x 16 rows of w
 *
 * Four products per two loads of activations and two of weights: one load per product. All
 * tiles are 16 rows of 64 bytes, so the configuration never changes within a call: rows of
 * tokens that are not there are computed on memory of ours and thrown away. */
#ifndef KT_AMX_TILES_H
#define KT_AMX_TILES_H

#include <stdint.h>

enum { KT_AMX_ROWS = 16, KT_AMX_LINE = 64 };

KT_INLINE void kt_amx_configure(void) {
  _Alignas(64) uint8_t config[64] = {1}; /* palette 1 */
  for (int tile = 0; tile < 8; tile++) {
    config[16 + 2 * tile] = KT_AMX_LINE; /* bytes per row, 16 bits each */
    config[48 + tile] = KT_AMX_ROWS;
  }
  _tile_loadconfig(config);
}

KT_INLINE void kt_amx_zero_sums(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

#endif
