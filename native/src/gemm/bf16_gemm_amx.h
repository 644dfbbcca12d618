/* bf16_gemm_amx.h - products with bf16 activations by TDPBF16PS.
 *
 * Formats other than BF16 decode the columns of a strip into tiles in the panel, a K block at a
 * time and once for all tokens. Sums of a group of columns with scales of their own start at 0
 * and are added to `out` by one fused operation each, as with AVX-512 (bf16_gemm_avx512.h), but
 * within a group tiles add even and odd columns apart: the last bits differ.
 *
 * From a format's LEAST_TOKENS on, an element's bits do not depend on the other tokens. Include
 * after KT_TARGET_BEGIN(AMX). */
#ifndef KT_BF16_GEMM_AMX_H
#define KT_BF16_GEMM_AMX_H

#include "amx_tiles.h"
#include "bf16_gemm_avx512.h"

enum {
  KT_BF16_SUMS_SIZE = 2 * KT_AMX_ROWS * KT_STRIP * 4,
  KT_BF16_SCALES_SIZE = KT_BF16_K_BLOCK / KT_TILE_COLS * KT_STRIP * 4
};

/* sums[i][t][32 rows] = w[32 rows][32 * tiles columns] * x[i][t], for half 0 and, if `both`,
 * half 1. */
KT_INLINE void kt_bf16_amx_block(const int both, const uint8_t *w, int64_t tiles,
                                 const uint8_t *x[2], int64_t stride, float *sums[2]) {
  kt_amx_zero_sums(both);
  for (int64_t i = 0; i < tiles; i++, w += KT_BF16_TILE) {
    const uint8_t *const halves[2] = {w, w + KT_BF16_HALF_TILE};
    const uint8_t *const at[2] = {x[0] + i * KT_AMX_LINE, both ? x[1] + i * KT_AMX_LINE : NULL};
    kt_amx_multiply(0, both, halves, at, stride);
  }
  void *const to[2] = {sums[0], both ? sums[1] : NULL};
  kt_amx_store_sums(both, to);
}

/* out[t][32 rows] += scale[32 rows] * sums[t][32 rows]. */
KT_INLINE void kt_bf16_amx_add(const float *scale, const float *sums, int64_t tokens, float *out) {
  const __m512 scale0 = _mm512_loadu_ps(scale), scale1 = _mm512_loadu_ps(scale + 16);
  for (int64_t t = 0; t < tokens; t++, sums += KT_STRIP, out += KT_STRIP) {
    const __m512 sum0 = _mm512_load_ps(sums), sum1 = _mm512_load_ps(sums + 16);
    _mm512_store_ps(out, _mm512_fmadd_ps(sum0, scale0, _mm512_load_ps(out)));
    _mm512_store_ps(out + 16, _mm512_fmadd_ps(sum1, scale1, _mm512_load_ps(out + 16)));
  }
}

/* Some columns of a strip, decoded: tiles, and 32 scales for each group of tiles. */
typedef struct kt_decoded {
  uint8_t *tiles;
  float *scale;
  int64_t groups, group_tiles;
} kt_decoded;

/* Fills all of `out` but the pointers, which have room for a K block: columns k to k + cols. */
typedef void kt_decode_block_fn(const kt_weight *w, int64_t strip, int64_t k, int64_t cols,
                                kt_decoded *out);

/* Halves `half` and, if `both`, the next: out[t][32 rows] += sum over groups of scale * (w * x[t]).
 */
KT_INLINE void kt_bf16_amx_groups(const int both, const kt_halves *h, int64_t half,
                                  const kt_decoded *w, const uint8_t *x, int64_t stride, float *out,
                                  float *scratch) {
  float *sums[2] = {scratch, scratch + KT_AMX_ROWS * KT_STRIP};
  for (int64_t g = 0; g < w->groups; g++) {
    const int64_t tile = g * w->group_tiles;
    const uint8_t *at[2];
    for (int i = 0; i < 1 + both; i++)
      at[i] = x + kt_half_start(h, half + i) * stride + tile * KT_AMX_LINE;
    kt_bf16_amx_block(both, w->tiles + tile * KT_BF16_TILE, w->group_tiles, at, stride, sums);
    for (int i = 0; i < 1 + both; i++) {
      const int64_t start = kt_half_start(h, half + i), first = kt_half_new(h, half + i);
      kt_bf16_amx_add(w->scale + g * KT_STRIP, sums[i] + (first - start) * KT_STRIP,
                      start + h->rows - first, out + first * KT_STRIP);
    }
  }
}

/* A product of weights that `decode` (a constant) turns into tiles; at least LEAST_TOKENS. */
KT_INLINE void kt_bf16_decoded_product(kt_decode_block_fn *decode, const kt_weight *w,
                                       int64_t strip, int64_t strips, const uint8_t *x,
                                       int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  _Static_assert(KT_BF16_K_BLOCK * KT_STRIP * 2 + KT_BF16_SUMS_SIZE + KT_BF16_SCALES_SIZE <=
                     KT_PANEL_SIZE,
                 "tiles of a K block, sums and scales lie in the panel");
  float *const scratch = (float *)(void *)(panel + KT_BF16_K_BLOCK * KT_STRIP * 2);
  kt_decoded decoded = {.tiles = panel, .scale = scratch + KT_BF16_SUMS_SIZE / 4};
  const int64_t k_block = kt_bf16_k_block(w->cols);
  const kt_halves h = kt_halves_of(tokens);
  kt_amx_configure_halves(&h, KT_AMX_LINE);
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    for (int64_t s = 0; s < strips; s++) {
      float *const to = out + s * tokens * KT_STRIP;
      decode(w, strip + s, k, cols, &decoded);
      int64_t half = 0;
      for (; half + 1 < h.count; half += 2)
        kt_bf16_amx_groups(1, &h, half, &decoded, x + 2 * k, stride, to, scratch);
      if (half < h.count) kt_bf16_amx_groups(0, &h, half, &decoded, x + 2 * k, stride, to, scratch);
    }
  }
  _tile_release();
}

#endif
