/* amx_tiles.h - how all AMX code divides the eight tiles. Include after target_amx.h.
 *
 *   0 1     sums: tile 2i + j holds 16 tokens (i) x 16 rows of w (j), 32-bit
 *   2 3
 *   4 5     activations: 16 tokens x 64 bytes of columns
 *   6 7     weights: a half tile, 16 groups of 4 bytes x 16 rows of w
 *
 * Four products per two loads of activations and two of weights: one load per product.
 * Configuring costs as much as many products, so it is done once for the whole blocks of
 * tokens and once for the rest (INT8, INT4), or once (bf16_gemm_amx.h), never inside of loops. */
#ifndef KT_AMX_TILES_H
#define KT_AMX_TILES_H

#include <stdint.h>

enum { KT_AMX_ROWS = 16, KT_AMX_LINE = 64 };

/* Tiles for rows0 (1..16) and rows1 (0..16) tokens; of 0, tiles 2, 3 and 5 are not to be used. */
KT_INLINE void kt_amx_configure_halves(int rows0, int rows1) {
  static const uint8_t block[8] = {0, 0, 1, 1, 0, 1, 2, 2}; /* whose tokens; 2: weights */
  _Alignas(64) uint8_t config[64] = {1};                    /* palette 1 */
  const int rows[3] = {rows0, rows1, KT_AMX_ROWS};
  for (int tile = 0; tile < 8; tile++) {
    config[48 + tile] = (uint8_t)rows[block[tile]];
    config[16 + 2 * tile] = config[48 + tile] ? KT_AMX_LINE : 0; /* bytes per row */
  }
  /* GCC's intrinsic says that it reads 8 bytes of config: without this the rest may go missing. */
  __asm__ volatile("" ::"m"(config));
  _tile_loadconfig(config);
}

/* Tiles for `tokens` (1..32) tokens, 16 of them in tile 4. */
KT_INLINE void kt_amx_configure(int tokens) {
  const int more = tokens - KT_AMX_ROWS;
  kt_amx_configure_halves(more > 0 ? KT_AMX_ROWS : tokens, more > 0 ? more : 0);
}

KT_INLINE void kt_amx_zero_sums(const int both) {
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

#endif
