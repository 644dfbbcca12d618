/* int_gemm_amx.h - products with INT8 and INT4 in KTransformers' layout, by TDPBSSD.
 *
 * A half tile of INT8 is a B tile as it is: 16 groups of 4 columns x 16 rows. INT4 is unpacked
 * into such tiles in the panel first, as many columns of a strip as fit. 32 tokens x 32
 * rows are summed in four tiles; with 16 tokens or fewer, in two.
 *
 * The sums are the same integers as everywhere. `int4` is a constant in every call. Include
 * after KT_TARGET_BEGIN(AMX). */
#ifndef KT_INT_GEMM_AMX_H
#define KT_INT_GEMM_AMX_H

#include "amx_tiles.h"
#include "int_gemm_avx512.h"

enum { KT_INT_RUNS = 10 /* column blocks of 32768 columns */ };

/* A tile of 128 columns as two of 64: columns in low nibbles, then those in high ones. */
KT_INLINE void kt_int4_unpack_tile(const uint8_t *tile, uint8_t *out) {
  const __m512i eight = _mm512_set1_epi8(8);
  for (int line = 0; line < 32; line++, tile += KT_AMX_LINE, out += KT_AMX_LINE) {
    const __m512i v = _mm512_loadu_si512(tile);
    const __m512i low = kt_int4_biased(v), high = kt_int4_biased(_mm512_srli_epi16(v, 4));
    _mm512_store_si512(out, _mm512_sub_epi8(low, eight));
    _mm512_store_si512(out + 2 * KT_HALF_TILE, _mm512_sub_epi8(high, eight));
  }
}

/* Tiles of 64 columns of one strip, where they lie: one run per column block of the layout. */
typedef struct kt_int_runs {
  const uint8_t *tiles[KT_INT_RUNS];
  int64_t count[KT_INT_RUNS], runs;
} kt_int_runs;

/* sum[t][32 rows] (+)= w[32 rows][columns of the runs] * x[t], for as many tokens as the tiles
 * are configured for; `both`: more than 16; `first`: from 0. */
KT_INLINE void kt_int_amx_block(const int both, int first, const kt_int_runs *w, const uint8_t *x,
                                int64_t stride, int32_t *sum) {
  const size_t sum_stride = KT_STRIP * sizeof *sum;
  int32_t *const sum1 = sum + KT_AMX_ROWS * KT_STRIP;
  void *const sums[2] = {sum, sum1};
  kt_amx_zero_sums(both);
  if (!first) {
    _tile_loadd(0, sum, sum_stride);
    _tile_loadd(1, sum + KT_AMX_ROWS, sum_stride);
    if (both) {
      _tile_loadd(2, sum1, sum_stride);
      _tile_loadd(3, sum1 + KT_AMX_ROWS, sum_stride);
    }
  }
  for (int64_t run = 0; run < w->runs; run++) {
    const uint8_t *tile = w->tiles[run];
    for (int64_t i = 0; i < w->count[run]; i++, tile += 2 * KT_HALF_TILE, x += KT_AMX_LINE) {
      const uint8_t *const halves[2] = {tile, tile + KT_HALF_TILE};
      const uint8_t *const at[2] = {x, x + KT_AMX_ROWS * stride};
      kt_amx_multiply(1, both, halves, at, stride);
    }
  }
  kt_amx_store_sums(both, sums);
}

/* Columns k .. end of a strip; those of INT4 are unpacked into the panel. */
KT_INLINE kt_int_runs kt_int_amx_runs(const int int4, const kt_weight *w, int64_t block_rows,
                                      int64_t strip, int64_t k, int64_t end, uint8_t *panel) {
  kt_int_runs found = {.runs = 0};
  for (int64_t cols; k < end; k += cols) {
    const int64_t left = KT_COL_BLOCK - k % KT_COL_BLOCK;
    cols = end - k < left ? end - k : left;
    const int64_t start = kt_tile_start(w->rows, w->cols, block_rows, strip * KT_STRIP, k);
    const uint8_t *tiles = w->codes + (int4 ? start / 2 : start);
    found.tiles[found.runs] = int4 ? panel : tiles;
    found.count[found.runs++] = cols / 64;
    for (int64_t i = 0; int4 && i < cols / 128; i++, panel += 4 * KT_HALF_TILE)
      kt_int4_unpack_tile(tiles + i * 2 * KT_HALF_TILE, panel);
  }
  return found;
}

KT_INLINE void kt_int_amx_strip(const int int4, const kt_weight *w, int64_t block_rows,
                                int64_t strip, const uint8_t *x, int64_t stride, int64_t first,
                                int64_t end, int32_t *sum, uint8_t *panel) {
  const int64_t k_block = int4 ? KT_PANEL_SIZE / KT_STRIP : w->cols;
  for (int64_t k = 0; k < w->cols; k += k_block) {
    const int64_t k_end = w->cols - k < k_block ? w->cols : k + k_block;
    const kt_int_runs runs = kt_int_amx_runs(int4, w, block_rows, strip, k, k_end, panel);
    for (int64_t t = first; t < end; t += 2 * KT_AMX_ROWS) {
      if (end - t > KT_AMX_ROWS)
        kt_int_amx_block(1, k == 0, &runs, x + t * stride + k, stride, sum + t * KT_STRIP);
      else
        kt_int_amx_block(0, k == 0, &runs, x + t * stride + k, stride, sum + t * KT_STRIP);
    }
  }
}

/* At least LEAST_TOKENS: whole blocks of 32, then the rest with tiles of fewer rows. */
KT_INLINE void kt_int_product_amx(const int int4, int64_t block_rows, const kt_weight *w,
                                  int64_t strip, int64_t strips, const uint8_t *x, int64_t stride,
                                  int64_t tokens, float *out, uint8_t *panel) {
  int32_t *const sum = (int32_t *)(void *)out;
  const int64_t whole = tokens / (2 * KT_AMX_ROWS) * (2 * KT_AMX_ROWS);
  for (int rest = whole == 0; rest < 2; rest++) {
    const int64_t first = rest ? whole : 0, end = rest ? tokens : whole;
    if (first == end) continue;
    kt_amx_configure(rest ? (int)(end - first) : 2 * KT_AMX_ROWS);
    for (int64_t s = 0; s < strips; s++)
      kt_int_amx_strip(int4, w, block_rows, strip + s, x, stride, first, end,
                       sum + s * tokens * KT_STRIP, panel);
  }
  _tile_release();
  for (int64_t s = 0; s < strips; s++)
    kt_int_finish(int4 ? 16.0f : 1.0f, (const float *)w->scale + (strip + s) * KT_STRIP, x, w->cols,
                  stride, tokens, out + s * tokens * KT_STRIP);
}

#endif
