/* bf16_gemm_avx512.h - products with bf16 activations by VDPBF16PS.
 *
 * Micro kernel: up to 12 tokens x 32 rows in registers. Per group of columns with scales of
 * their own, sums start at 0 and are added to `out` by one fused operation each; without
 * scales they go on from `out`. Either way an element is one chain over ascending columns,
 * whatever the loop order, so its bits do not depend on the batch.
 *
 * Loop orders. Few tokens: codes are decoded in registers; lines are read in strictly
 * ascending order, which is what DRAM needs (see kt_gemm_avx512.h). Many tokens: columns are
 * cut into blocks; a block of a strip is decoded into the panel once (for BF16: is brought
 * to L2 by the first tokens), and all tokens are multiplied with it there, both half tiles
 * at a time, so that each broadcast serves two lines.
 *
 * `format` is a constant in every call. Include after target_avx512_bf16.h. */
#ifndef KT_BF16_GEMM_AVX512_H
#define KT_BF16_GEMM_AVX512_H

#include "bf16_gemm.h"

enum {
  KT_BF16_BLOCK = 12,    /* tokens of the micro kernel */
  KT_DECODE_BLOCK = 6,   /* the same where lines are decoded on the way */
  KT_BF16_K_BLOCK = 1024 /* columns */
};

/* How codes are stored; the constants of a loop. */
typedef enum kt_line_format { KT_LINES_BF16, KT_LINES_FP8, KT_LINES_MXFP4 } kt_line_format;

/* Tables that decoders need, in registers. */
typedef struct kt_line_tables {
  __m512i high0, high64, low0, low64; /* FP8: bytes of bf16 for 7-bit magnitudes */
  __m512i words;                      /* MXFP4: bf16 of 16 codes, twice */
} kt_line_tables;

/* bf16 lines of one packed line. */
#define KT_LINES_OF(format) ((format) == KT_LINES_BF16 ? 1 : (format) == KT_LINES_FP8 ? 2 : 4)

/* Line j of a packed FP8 line: in each 16 bytes, 8 of columns 0, 1 and 8 of columns 2, 3. */
KT_INLINE __m512i kt_fp8_line(const kt_line_tables *t, __m512i v, const int j) {
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  const __m512i high = _mm512_permutex2var_epi8(t->high0, v, t->high64);
  const __m512i low = _mm512_permutex2var_epi8(t->low0, v, t->low64);
  const __m512i signed_high = _mm512_ternarylogic_epi32(high, v, sign, 0xf8); /* high | v & sign */
  return j ? _mm512_unpackhi_epi8(low, signed_high) : _mm512_unpacklo_epi8(low, signed_high);
}

KT_INLINE __m512i kt_decoded_line(const kt_line_format format, const kt_line_tables *t, __m512i v,
                                  const int j) {
  if (format == KT_LINES_BF16) return v;
  if (format == KT_LINES_FP8) return kt_fp8_line(t, v, j);
  /* VPERMW looks at 5 bits of each word: the nibble and one bit that the table ignores. */
  const __m512i shifted = j == 0   ? v
                          : j == 1 ? _mm512_srli_epi16(v, 4)
                          : j == 2 ? _mm512_srli_epi16(v, 8)
                                   : _mm512_srli_epi16(v, 12);
  return _mm512_permutexvar_epi16(shifted, t->words);
}

KT_INLINE __m512 kt_bf16_dot(__m512 sum, __m512i line, const uint8_t *x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return _mm512_dpbf16_ps(sum, (__m512bh)line, (__m512bh)_mm512_set1_epi32(pair));
}

/* All lines of one half tile for all tokens, or (both) of both. A macro, since compilers
 * keep sums in registers only if they see all of it as one function. */
#define KT_BF16_LINES(half, both)                                                                  \
  for (int p = 0; p < 16 / lines; p++) {                                                           \
    const uint8_t *const at = tile + (half) * half_tile + p * KT_LINE;                             \
    const __m512i packed0 = _mm512_loadu_si512(at);                                                \
    const __m512i packed1 = (both) ? _mm512_loadu_si512(at + half_tile) : packed0;                 \
    _Pragma("GCC unroll 4") for (int j = 0; j < lines; j++) {                                      \
      const __m512i line0 = kt_decoded_line(format, tables, packed0, j);                           \
      const __m512i line1 = (both) ? kt_decoded_line(format, tables, packed1, j) : line0;          \
      _Pragma("GCC unroll 12") for (int t = 0; t < tokens; t++) {                                  \
        const uint8_t *const pair = base[t / 3] + t % 3 * stride + (p * lines + j) * 4;            \
        acc[t][half] = kt_bf16_dot(acc[t][half], line0, pair);                                     \
        if (both) acc[t][1] = kt_bf16_dot(acc[t][1], line1, pair);                                 \
      }                                                                                            \
    }                                                                                              \
  }

/* out[t][32 rows] += sum over groups of scale[group][32 rows] * (w * x[t] over its columns);
 * scale NULL: one group, no scale. */
KT_INLINE void kt_bf16_micro(const kt_line_format format, const int ascending, const int tokens,
                             const kt_line_tables *tables, const uint8_t *w, int64_t groups,
                             int64_t group_tiles, const float *scale, const uint8_t *x,
                             int64_t stride, float *out) {
  const int lines = KT_LINES_OF(format), half_tile = KT_BF16_HALF_TILE / lines;
  const uint8_t *base[KT_BF16_BLOCK / 3] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride};
  const uint8_t *tile = w;
  __m512 acc[KT_BF16_BLOCK][2];
  for (int64_t g = 0; g < groups; g++) {
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++) {
      acc[t][0] = scale ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * KT_STRIP);
      acc[t][1] = scale ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * KT_STRIP + 16);
    }
    for (int64_t i = 0; i < group_tiles; i++, tile += 2 * half_tile) {
      if (ascending) {
#pragma GCC unroll 16
        KT_BF16_LINES(0, 0)
        __asm__ volatile("" ::: "memory"); /* else the broadcasts are kept for the other half */
#pragma GCC unroll 16
        KT_BF16_LINES(1, 0)
      } else {
#pragma GCC unroll 16
        KT_BF16_LINES(0, 1)
      }
#pragma GCC unroll 4
      for (int p = 0; p < (tokens + 2) / 3; p++) base[p] += KT_TILE_COLS * 2;
    }
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 scale0 = scale ? _mm512_loadu_ps(scale + g * KT_STRIP) : one;
    const __m512 scale1 = scale ? _mm512_loadu_ps(scale + g * KT_STRIP + 16) : one;
#pragma GCC unroll 12
    for (int t = 0; t < tokens; t++) {
      float *const to = out + t * KT_STRIP;
      _mm512_storeu_ps(to,
                       scale ? _mm512_fmadd_ps(acc[t][0], scale0, _mm512_loadu_ps(to)) : acc[t][0]);
      _mm512_storeu_ps(to + 16, scale ? _mm512_fmadd_ps(acc[t][1], scale1, _mm512_loadu_ps(to + 16))
                                      : acc[t][1]);
    }
  }
}

KT_INLINE void kt_bf16_micro_any(const kt_line_format format, const int ascending, int64_t tokens,
                                 const kt_line_tables *tables, const uint8_t *w, int64_t groups,
                                 int64_t group_tiles, const float *scale, const uint8_t *x,
                                 int64_t stride, float *out) {
  const int most = format == KT_LINES_BF16 ? KT_BF16_BLOCK : KT_DECODE_BLOCK;
  switch (tokens) {
#define KT_CASE(n)                                                                                 \
  case n:                                                                                          \
    if (n <= most)                                                                                 \
      kt_bf16_micro(format, ascending, n, tables, w, groups, group_tiles, scale, x, stride, out);  \
    break;
    KT_CASE(1)
    KT_CASE(2)
    KT_CASE(3)
    KT_CASE(4)
    KT_CASE(5)
    KT_CASE(6)
    KT_CASE(7)
    KT_CASE(8)
    KT_CASE(9)
    KT_CASE(10)
    KT_CASE(11)
    KT_CASE(12)
#undef KT_CASE
  }
}

/* Tokens `first` and on, in blocks of nearly equal size. */
KT_INLINE void kt_bf16_blocks(const kt_line_format format, const int ascending, int64_t first,
                              int64_t tokens, const kt_line_tables *tables, const uint8_t *w,
                              int64_t groups, int64_t group_tiles, const float *scale,
                              const uint8_t *x, int64_t stride, float *out) {
  const int64_t blocks = (tokens - first + KT_BF16_BLOCK - 1) / KT_BF16_BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t t = first + (tokens - first) * b / blocks;
    const int64_t end = first + (tokens - first) * (b + 1) / blocks;
    kt_bf16_micro_any(format, ascending, end - t, tables, w, groups, group_tiles, scale,
                      x + t * stride, stride, out + t * KT_STRIP);
  }
}

/* Packed tiles as bf16 tiles. */
KT_INLINE void kt_bf16_fill_panel(const kt_line_format format, const kt_line_tables *tables,
                                  const uint8_t *w, int64_t tiles, uint8_t *panel) {
  const int lines = KT_LINES_OF(format);
  for (int64_t i = 0; i < tiles * 2 * (16 / lines); i++, w += KT_LINE) {
    const __m512i packed = _mm512_loadu_si512(w);
#pragma GCC unroll 4
    for (int j = 0; j < lines; j++, panel += KT_LINE)
      _mm512_store_si512(panel, kt_decoded_line(format, tables, packed, j));
  }
}

/* scale: [strips of the call][groups of the row][32] floats, or NULL. group_cols: a divisor
 * of K_BLOCK, or (no scales) anything. */
KT_INLINE void kt_bf16_product(const kt_line_format format, int64_t few,
                               const kt_line_tables *tables, const kt_weight *w, int64_t strip,
                               int64_t strips, int64_t group_cols, const float *scale,
                               const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                               uint8_t *panel) {
  const int64_t tile_size = 2 * KT_BF16_HALF_TILE / KT_LINES_OF(format);
  const int64_t strip_size = w->cols / KT_TILE_COLS * tile_size;
  const int64_t k_block = tokens <= few ? w->cols : KT_BF16_K_BLOCK;
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    const int64_t groups = scale ? cols / group_cols : 1, tiles = cols / KT_TILE_COLS;
    for (int64_t s = 0; s < strips; s++) {
      const uint8_t *const codes =
          w->codes + (strip + s) * strip_size + k / KT_TILE_COLS * tile_size;
      const float *const scales =
          scale ? scale + (s * (w->cols / group_cols) + k / group_cols) * KT_STRIP : NULL;
      float *const to = out + s * tokens * KT_STRIP;
      const uint8_t *const xk = x + 2 * k;
      if (tokens <= few) {
        kt_bf16_blocks(format, 1, 0, tokens, tables, codes, groups, tiles / groups, scales, xk,
                       stride, to);
      } else if (format == KT_LINES_BF16) {
        kt_bf16_blocks(format, 1, 0, few, tables, codes, groups, tiles / groups, scales, xk, stride,
                       to);
        kt_bf16_blocks(format, 0, few, tokens, tables, codes, groups, tiles / groups, scales, xk,
                       stride, to);
      } else {
        kt_bf16_fill_panel(format, tables, codes, tiles, panel);
        kt_bf16_blocks(KT_LINES_BF16, 0, 0, tokens, tables, panel, groups, tiles / groups, scales,
                       xk, stride, to);
      }
    }
  }
}

#endif
