/* BF16 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../common/target_amx.h"

#include "../common/amx_tiles.h"
#include "bf16.h"

/* Fewer tokens are left to VDPBF16PS (see kt_gemm_amx.h). */
enum { LEAST_TOKENS = 5 };

/* out[t][32 rows] = w[32 rows][32 * tiles columns] * x[t], for as many tokens as the tiles are
 * configured for; `both`: more than 16. */
KT_INLINE void multiply_block(const int both, const uint8_t *w, int64_t tiles, const uint8_t *x,
                              int64_t stride, float *out) {
  const size_t out_stride = KT_STRIP * sizeof *out, rows = (size_t)stride;
  float *const out1 = out + KT_AMX_ROWS * KT_STRIP;
  const uint8_t *const x1 = x + KT_AMX_ROWS * stride;
  kt_amx_zero_sums(both);
  for (int64_t i = 0; i < tiles; i++, w += 2 * KT_BF16_HALF_TILE) {
    _tile_loadd(6, w, KT_AMX_LINE);
    _tile_loadd(7, w + KT_BF16_HALF_TILE, KT_AMX_LINE);
    _tile_loadd(4, x + i * KT_AMX_LINE, rows);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, x1 + i * KT_AMX_LINE, rows);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + KT_AMX_ROWS, out_stride);
  if (both) {
    _tile_stored(2, out1, out_stride);
    _tile_stored(3, out1 + KT_AMX_ROWS, out_stride);
  }
}

static void multiply_strip(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                           int64_t first, int64_t end, float *out) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  const uint8_t *const codes = w->codes + strip * tiles * 2 * KT_BF16_HALF_TILE;
  for (int64_t t = first; t < end; t += 2 * KT_AMX_ROWS) {
    if (end - t > KT_AMX_ROWS)
      multiply_block(1, codes, tiles, x + t * stride, stride, out + t * KT_STRIP);
    else
      multiply_block(0, codes, tiles, x + t * stride, stride, out + t * KT_STRIP);
  }
}

void kt_bf16_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < LEAST_TOKENS) {
    kt_bf16_product_avx512(w, strip, strips, x, stride, tokens, out, panel);
    return;
  }
  const int64_t whole = tokens / (2 * KT_AMX_ROWS) * (2 * KT_AMX_ROWS);
  for (int rest = whole == 0; rest < 2; rest++) {
    const int64_t first = rest ? whole : 0, end = rest ? tokens : whole;
    if (first == end) continue;
    kt_amx_configure(rest ? (int)(end - first) : 2 * KT_AMX_ROWS);
    for (int64_t s = 0; s < strips; s++)
      multiply_strip(w, strip + s, x, stride, first, end, out + s * tokens * KT_STRIP);
  }
  _tile_release();
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
