/* group_gemm_amx.h - products with integers in groups of columns with AMX, by TDPBSSD.
 *
 * A K block of a strip is unpacked into int8 tiles in the panel, once for all tokens. The sums of
 * a group are stored, then scaled and added as with AVX-512: the same integers and the same float
 * operations, so the same bits.
 *
 * A group is two steps of 64 columns, one of 64, or one of 32. For the last, tiles are configured
 * for 32 bytes of columns. Filling them up with zeros would need no fewer products, and a second
 * group in a tile cannot be used, its sums being apart; a narrow tile of weights takes half the
 * load and half the room.
 *
 * It pays for all three. Cycles for 16 tokens x 16 rows x a group of 32 columns, counted, not
 * measured: product 16, loads 6, stores 32 (tile, totals), 48 vector operations at two a cycle: 32
 * if all overlap, 78 if nothing does; unpacking at most 10 more. AVX-512: 128 VPDPBUSD, 48
 * operations for the sums, 36 to unpack: 106. With groups of 128 columns, 32 to 104 against 352.
 *
 * A group's sums are added after the next group's products: they can be read only when the tile's
 * store is through, and the products do not wait for that.
 *
 * `bits` is a constant in every call. Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_GROUP_GEMM_AMX_H
#define KT_GROUP_GEMM_AMX_H

#include "amx_tiles.h"
#include "group_scales_avx512.h"

enum {
  K_BLOCK = 2048, /* columns of a strip that are unpacked at a time */
  TILES_SIZE = K_BLOCK * KT_STRIP,
  SUMS = KT_AMX_ROWS * KT_STRIP /* of a half */
};

typedef int32_t sums_pair[2][SUMS];

_Static_assert(TILES_SIZE + 2 * sizeof(sums_pair) <= KT_PANEL_SIZE, "tiles and sums in the panel");

/* Some columns of a strip: whole groups. */
typedef struct columns {
  const uint8_t *tiles; /* pairs of half tiles */
  const void *scale;    /* of the first group */
  int32_t scale_dtype;
  int64_t groups, group_steps, line; /* line: columns of a step */
} columns;

/* The same columns of activation rows: codes, then scale of the first group. */
typedef struct activations {
  const uint8_t *codes;
  const float *scale;
  int64_t stride; /* bytes */
} activations;

static int64_t half_tile_size(int64_t line) { return line / 4 * KT_LINE; }

/* Steps of `line` columns: rows 0..15 are the lines of the first half tile, 16..31 of the second.
 */
KT_INLINE void unpack(const int bits, const uint8_t *codes, int64_t steps, int64_t line,
                      uint8_t *out) {
  const __m512i low = _mm512_set1_epi8(15), bias = _mm512_set1_epi8((char)KT_GROUP_BIAS(bits));
  const int64_t half = half_tile_size(line);
  for (int64_t i = 0; i < steps; i++, out += 2 * half)
    for (int64_t at = 0; at < half; at += KT_LINE, codes += bits / 4 * KT_LINE) {
      const __m512i v = _mm512_loadu_si512(codes);
      const __m512i w0 = bits == 4 ? _mm512_and_si512(v, low) : v;
      const __m512i w1 = bits == 4 ? _mm512_and_si512(_mm512_srli_epi16(v, 4), low)
                                   : _mm512_loadu_si512(codes + KT_LINE);
      _mm512_store_si512(out + at, _mm512_sub_epi8(w0, bias));
      _mm512_store_si512(out + half + at, _mm512_sub_epi8(w1, bias));
    }
}

/* sums[i][t][32 rows] = w * x[i][t] for group g. */
KT_INLINE void multiply_group(const int both, const columns *w, int64_t g,
                              const uint8_t *const x[2], int64_t stride, sums_pair sums) {
  const int64_t half = half_tile_size(w->line), first = g * w->group_steps;
  void *const to[2] = {sums[0], sums[1]};
  kt_amx_zero_sums(both);
  for (int64_t i = first; i < first + w->group_steps; i++) {
    const uint8_t *const tile = w->tiles + i * 2 * half;
    const uint8_t *const halves[2] = {tile, tile + half};
    const uint8_t *const at[2] = {x[0] + i * w->line, x[1] + i * w->line};
    kt_amx_multiply(1, both, halves, at, stride);
  }
  kt_amx_store_sums(both, to);
}

/* out[t][32 rows] += sums[t][32 rows] * scales of group g, for tokens first .. end. */
KT_INLINE void add_group(const columns *w, int64_t g, const activations *x, int64_t first,
                         int64_t end, const int32_t *sums, float *out) {
  const __m512 scale0 = kt_group_load_scales(w->scale_dtype, w->scale, g * KT_STRIP);
  const __m512 scale1 = kt_group_load_scales(w->scale_dtype, w->scale, g * KT_STRIP + 16);
  const int64_t words = x->stride / (int64_t)sizeof(float);
  for (int64_t t = first; t < end; t++, sums += KT_STRIP) {
    const __m512 x_scale = _mm512_set1_ps(x->scale[t * words + g]);
    float *const to = out + t * KT_STRIP;
    const __m512i sum0 = _mm512_load_si512(sums), sum1 = _mm512_load_si512(sums + 16);
    _mm512_store_ps(to, kt_group_add(_mm512_load_ps(to), sum0, scale0, x_scale));
    _mm512_store_ps(to + 16, kt_group_add(_mm512_load_ps(to + 16), sum1, scale1, x_scale));
  }
}

/* Halves `half` and, if `both`, the next: out[t][32 rows] += w * x[t]. */
KT_INLINE void multiply_halves(const int both, const kt_halves *h, int64_t half, const columns *w,
                               const activations *x, float *out, sums_pair *sums) {
  int64_t start[2];
  const uint8_t *codes[2];
  for (int i = 0; i < 2; i++) {
    start[i] = kt_half_start(h, half + i * both);
    codes[i] = x->codes + start[i] * x->stride;
  }
  for (int64_t g = 0; g <= w->groups; g++) {
    if (g < w->groups) multiply_group(both, w, g, codes, x->stride, sums[g % 2]);
    for (int i = 0; g > 0 && i < 1 + both; i++) {
      const int64_t first = kt_half_new(h, half + i);
      const int32_t *const from = sums[(g - 1) % 2][i] + (first - start[i]) * KT_STRIP;
      add_group(w, g - 1, x, first, start[i] + h->rows, from, out);
    }
  }
}

/* Columns k to k + cols of a strip, unpacked into the panel. */
KT_INLINE columns unpacked(const int bits, const kt_weight *w, int64_t strip, int64_t k,
                           int64_t cols, uint8_t *panel) {
  const int64_t group = w->layout.group, line = group < KT_AMX_LINE ? group : KT_AMX_LINE;
  const int64_t row = strip * KT_STRIP, scale_size = w->layout.scale_dtype == KT_SCALE_F32 ? 4 : 2;
  const int64_t scale = kt_group_scale_index(w->cols, group, row, k / group);
  unpack(bits, w->codes + kt_bf16_tile_start(w->cols, KT_GROUP_TILE(bits), row, k), cols / line,
         line, panel);
  return (columns){panel,
                   (const uint8_t *)w->scale + scale * scale_size,
                   w->layout.scale_dtype,
                   cols / group,
                   group / line,
                   line};
}

/* Groups of 32 columns fill half a tile, and each costs a store of sums. */
KT_INLINE int64_t kt_group_least_tokens(const kt_weight *w) {
  return w->layout.group > 32 ? 14 : 32;
}

/* From so many tokens on. */
KT_INLINE void kt_group_product_amx(const int bits, const kt_weight *w, int64_t strip,
                                    int64_t strips, const uint8_t *x, int64_t stride,
                                    int64_t tokens, float *out, uint8_t *panel) {
  const int64_t group = w->layout.group;
  const kt_halves h = kt_halves_of(tokens);
  sums_pair *const sums = (sums_pair *)(void *)(panel + TILES_SIZE);
  kt_amx_configure_halves(&h, group < KT_AMX_LINE ? (int)group : KT_AMX_LINE);
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < K_BLOCK ? w->cols - k : K_BLOCK;
    const activations rows = {x + k, kt_group_x_scale(x, w->cols) + k / group, stride};
    for (int64_t s = 0; s < strips; s++) {
      const columns c = unpacked(bits, w, strip + s, k, cols, panel);
      float *const to = out + s * tokens * KT_STRIP;
      int64_t half = 0;
      for (; half + 1 < h.count; half += 2) multiply_halves(1, &h, half, &c, &rows, to, sums);
      if (half < h.count) multiply_halves(0, &h, half, &c, &rows, to, sums);
    }
  }
  _tile_release();
}

#endif
