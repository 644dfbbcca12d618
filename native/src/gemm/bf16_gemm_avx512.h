/* bf16_gemm_avx512.h - products with bf16 activations by VDPBF16PS.
 *
 * Micro kernel: up to 12 tokens x 32 rows in registers. Per group of columns with scales of
 * their own, sums start at 0 and are added to `out` by one fused operation each; without
 * scales they go on from `out`. Either way an element is one chain over ascending columns,
 * whatever the loop order, so its bits do not depend on the batch.
 *
 * Loop order. The first block of tokens reads packed weights, lines in strictly ascending
 * order, which is what DRAM needs (see int/int_gemm_avx512.c), and decodes them in registers. If
 * there are more blocks, it leaves its decoded lines in the panel for them: nothing is decoded
 * twice. Columns are cut so that those of a strip and of the activations stay in L2; not for
 * the fewest tokens, which want long runs of DRAM more than that (K = 7168, blocks of 2048
 * against none, FP8: 12 tokens 212 against 199 GFLOPS, 4 tokens 189 against 183, 1 token 70
 * against 72; blocks of 1024 and 512 are slower).
 *
 * One token of FP8 has but two chains of sums, 6 cycles of latency each, 37 GB/s: still more
 * than the DRAM of a Zen 4 core gives (31 GB/s). Four chains (45 GB/s in cache) and prefetching
 * were tried and did not help there.
 *
 * `form`, `keep` and `tokens` are constants of a micro kernel. Include after
 * KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_BF16_GEMM_AVX512_H
#define KT_BF16_GEMM_AVX512_H

#include "../simd/unroll.h"
#include "bf16_gemm.h"

enum {
  KT_BF16_BLOCK = 12,     /* tokens of the micro kernel: 24 sums of 32 registers */
  KT_BF16_K_BLOCK = 2048, /* columns, at most */
  KT_BF16_WHOLE = 4,      /* up to this many tokens, columns are not cut */
  KT_BF16_AHEAD = 4096,   /* bytes by which weights are prefetched */
  KT_BF16_STEP = 16       /* columns of one round of the inner loop, where woven */
};

/* How the 32 bf16 lines of a tile lie in memory. Halves: lines of rows 0..15, then lines of
 * rows 16..31. Woven: in turn one of rows 0..15, one of rows 16..31. */
typedef enum kt_form {
  KT_FORM_BF16,   /* halves */
  KT_FORM_CACHED, /* the same, but read in woven order: better unless they come from DRAM */
  KT_FORM_PANEL,  /* woven */
  KT_FORM_FP8     /* woven, two lines in one */
} kt_form;

/* Tables that decoders need, in registers. */
typedef struct kt_line_tables {
  __m512i high0, high64, low0, low64; /* FP8: bytes of bf16 for 7-bit magnitudes */
} kt_line_tables;

#define KT_LINES_OF(form) ((form) == KT_FORM_FP8 ? 2 : 1)
#define KT_IS_WOVEN(form) ((form) >= KT_FORM_PANEL)

/* Whether a first block of tokens prefetches its weights: it does where its arithmetic takes
 * about as long as DRAM, which hardware prefetchers then serve too late. From DRAM, with and
 * without (GB/s, K = 2048, one Zen 4 core of 33 GB/s): BF16 6 tokens 25.7 and 28.7, 8 tokens
 * 23.1 and 20.2, 12 tokens 16.1 and 13.3; FP8 1 token 30.1 and 29.3, 4 tokens 21.3 and 19.3,
 * 12 tokens 9.1 and 7.0. */
#define KT_PREFETCHES(form, tokens)                                                                \
  ((form) == KT_FORM_BF16 ? (tokens) >= 8 : (form) == KT_FORM_FP8 && (tokens) >= 3)

/* A packed FP8 line: in each 16 bytes, 8 of the one and 8 of the other. */
KT_INLINE void kt_fp8_lines(const kt_line_tables *t, __m512i v, __m512i *line0, __m512i *line1) {
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  const __m512i low = _mm512_permutex2var_epi8(t->low0, v, t->low64);
  const __m512i high = _mm512_permutex2var_epi8(t->high0, v, t->high64);
  const __m512i signed_high = _mm512_ternarylogic_epi32(high, v, sign, 0xf8); /* high | v & sign */
  *line0 = _mm512_unpacklo_epi8(low, signed_high);
  *line1 = _mm512_unpackhi_epi8(low, signed_high);
}

/* Columns 2q and 2q+1 of both half tiles, q counted from `at`. */
KT_INLINE void kt_both_lines(const kt_form form, const kt_line_tables *t, const uint8_t *at,
                             const int q, __m512i *line0, __m512i *line1) {
  const int line = KT_IS_WOVEN(form) ? 2 * q / KT_LINES_OF(form) : q;
  const __m512i v = _mm512_loadu_si512(at + line * KT_LINE);
  if (form == KT_FORM_FP8) {
    kt_fp8_lines(t, v, line0, line1);
  } else {
    *line0 = v;
    *line1 = _mm512_loadu_si512(
        at + (form == KT_FORM_PANEL ? (2 * q + 1) * KT_LINE : KT_BF16_HALF_TILE + q * KT_LINE));
  }
}

/* Two activations for all rows. */
KT_INLINE __m512i kt_pair(const uint8_t *x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, sizeof pair);
  return _mm512_set1_epi32(pair);
}

/* The same in a register, not by VBROADCASTSS, which clang takes: on Zen 4 that is in the way
 * of other shuffles (FP8, 12 tokens: 177 against 215 GFLOPS). */
KT_INLINE __m512i kt_pair_loaded(const uint8_t *x) {
#if defined(__clang__)
  __m512i pair;
  __asm__ volatile("vpbroadcastd %1, %0" : "=v"(pair) : "m"(*(const uint8_t (*)[4])x));
  return pair;
#else
  return kt_pair(x);
#endif
}

KT_INLINE __m512 kt_bf16_dot(__m512 sum, __m512i line, __m512i pair) {
  return _mm512_dpbf16_ps(sum, (__m512bh)line, (__m512bh)pair);
}

/* The two rounds below are macros, since compilers keep sums in registers only if they see
 * all of it as one function. Both advance `base` and `at`. */
#define KT_EACH_TOKEN                                                                              \
  KT_UNROLL(12)                                                                                    \
  for (int t = 0; t < KT_BF16_BLOCK; t++)                                                          \
    if (t < tokens)

#define KT_EACH_BASE                                                                               \
  KT_UNROLL(4)                                                                                     \
  for (int p = 0; p < KT_BF16_BLOCK / 3; p++)                                                      \
    if (3 * p < tokens)

/* `step` columns of all rows; each pair of activations serves two lines. */
#define KT_WOVEN_ROUND                                                                             \
  KT_UNROLL(16)                                                                                    \
  for (int q = 0; q < step / 2; q++) {                                                             \
    __m512i line0, line1;                                                                          \
    if (KT_PREFETCHES(form, tokens) && 2 * q % KT_LINES_OF(form) == 0)                             \
      _mm_prefetch((const char *)at + 2 * q / KT_LINES_OF(form) * KT_LINE + KT_BF16_AHEAD,         \
                   _MM_HINT_T0);                                                                   \
    kt_both_lines(form, tables, at, q, &line0, &line1);                                            \
    if (keep) {                                                                                    \
      _mm512_store_si512(panel + 2 * q * KT_LINE, line0);                                          \
      _mm512_store_si512(panel + (2 * q + 1) * KT_LINE, line1);                                    \
    }                                                                                              \
    KT_EACH_TOKEN {                                                                                \
      const __m512i pair = kt_pair_loaded(base[t / 3] + t % 3 * stride + q * 4);                   \
      acc[t][0] = kt_bf16_dot(acc[t][0], line0, pair);                                             \
      acc[t][1] = kt_bf16_dot(acc[t][1], line1, pair);                                             \
    }                                                                                              \
    KT_IN_ORDER;                                                                                   \
  }

/* A half tile. */
#define KT_HALF_ROUND(half)                                                                        \
  KT_UNROLL(16)                                                                                    \
  for (int q = 0; q < 16; q++) {                                                                   \
    const uint8_t *const from = at + (half) * KT_BF16_HALF_TILE + q * KT_LINE;                     \
    if (KT_PREFETCHES(form, tokens))                                                               \
      _mm_prefetch((const char *)from + KT_BF16_AHEAD, _MM_HINT_T0);                               \
    const __m512i line = _mm512_loadu_si512(from);                                                 \
    KT_EACH_TOKEN acc[t][half] =                                                                   \
        kt_bf16_dot(acc[t][half], line, kt_pair(base[t / 3] + t % 3 * stride + q * 4));            \
    KT_IN_ORDER;                                                                                   \
  }

/* out[t][32 rows] += sum over groups of scale[group][32 rows] * (w * x[t] over its columns);
 * scale NULL: one group, no scale. keep: the panel gets the decoded lines. */
KT_INLINE void kt_bf16_micro(const kt_form form, const int keep, const int tokens,
                             const kt_line_tables *given, const uint8_t *w, int64_t groups,
                             int64_t group_tiles, const float *scale, const uint8_t *x,
                             int64_t stride, float *out, uint8_t *panel) {
  const int step = form == KT_FORM_BF16 || form == KT_FORM_CACHED ? KT_TILE_COLS : KT_BF16_STEP;
  const uint8_t *base[KT_BF16_BLOCK / 3] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride};
  const uint8_t *at = w;
  /* A copy, which stays in registers: behind KT_IN_ORDER memory may have changed. */
  const kt_line_tables copy = form == KT_FORM_FP8 ? *given : (kt_line_tables){0}, *tables = &copy;
  __m512 acc[KT_BF16_BLOCK][2];
  for (int64_t g = 0; g < groups; g++) {
    KT_EACH_TOKEN {
      acc[t][0] = scale ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * KT_STRIP);
      acc[t][1] = scale ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * KT_STRIP + 16);
    }
    for (int64_t i = 0; i < group_tiles * (KT_TILE_COLS / step); i++) {
      if (form == KT_FORM_BF16) {
        KT_HALF_ROUND(0)
        KT_HALF_ROUND(1)
      } else {
        KT_WOVEN_ROUND
      }
      at += step * KT_STRIP * 2 / KT_LINES_OF(form);
      if (keep) panel += step * KT_STRIP * 2;
      KT_EACH_BASE base[p] += step * 2;
    }
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 scale0 = scale ? _mm512_loadu_ps(scale + g * KT_STRIP) : one;
    const __m512 scale1 = scale ? _mm512_loadu_ps(scale + g * KT_STRIP + 16) : one;
    KT_EACH_TOKEN {
      float *const to = out + t * KT_STRIP;
      if (scale) acc[t][0] = _mm512_fmadd_ps(acc[t][0], scale0, _mm512_loadu_ps(to));
      if (scale) acc[t][1] = _mm512_fmadd_ps(acc[t][1], scale1, _mm512_loadu_ps(to + 16));
      _mm512_storeu_ps(to, acc[t][0]);
      _mm512_storeu_ps(to + 16, acc[t][1]);
    }
  }
}

typedef void kt_bf16_micro_fn(const kt_line_tables *tables, const uint8_t *w, int64_t groups,
                              int64_t group_tiles, const float *scale, const uint8_t *x,
                              int64_t stride, float *out, uint8_t *panel);

/* Of a format, by tokens - 1: for all tokens; for the first block of more than 12, and for the
 * further ones. Blocks of several have at least half of the tokens that fit. */
typedef struct kt_bf16_kernels {
  kt_bf16_micro_fn *const *alone, *const *first, *const *further;
  int as_is; /* whether further blocks read the weights, else what the first left in the panel */
} kt_bf16_kernels;

/* least: tokens of the smallest block. */
#define KT_BF16_MICRO(n, name, form, keep, least)                                                  \
  KT_NOINLINE void name##n(const kt_line_tables *tables, const uint8_t *w, int64_t groups,         \
                           int64_t group_tiles, const float *scale, const uint8_t *x,              \
                           int64_t stride, float *out, uint8_t *panel) {                           \
    if (n >= least)                                                                                \
      kt_bf16_micro(form, keep, n, tables, w, groups, group_tiles, scale, x, stride, out, panel);  \
  }

/* Defines kt_bf16_micro_fn *name[12]. */
#define KT_BF16_MICROS(name, form, keep, least)                                                    \
  KT_1_TO_12(KT_BF16_MICRO, name##_of_, form, keep, least)                                         \
  static kt_bf16_micro_fn *const name[] = {KT_1_TO_12(KT_NUMBERED, name##_of_)};

/* Some columns of one strip for all tokens, in blocks of nearly equal size. */
KT_INLINE void kt_bf16_strip(const kt_bf16_kernels *kernels, const kt_line_tables *tables,
                             const uint8_t *codes, int64_t groups, int64_t group_tiles,
                             const float *scale, const uint8_t *x, int64_t stride, int64_t tokens,
                             float *out, uint8_t *panel) {
  const int64_t blocks = (tokens + KT_BF16_BLOCK - 1) / KT_BF16_BLOCK;
  const uint8_t *const decoded = kernels->as_is ? codes : panel;
  for (int64_t b = 0, t = 0, end; b < blocks; b++, t = end) {
    end = tokens * (b + 1) / blocks;
    kt_bf16_micro_fn *const *const micro = b            ? kernels->further
                                           : blocks > 1 ? kernels->first
                                                        : kernels->alone;
    micro[end - t - 1](tables, b ? decoded : codes, groups, group_tiles, scale, x + t * stride,
                       stride, out + t * KT_STRIP, panel);
  }
}

/* K_BLOCK or less, so that blocks are of nearly equal size, whole groups each. */
static inline int64_t kt_bf16_k_block(int64_t cols) {
  const int64_t blocks = (cols + KT_BF16_K_BLOCK - 1) / KT_BF16_K_BLOCK, step = 128;
  return (cols + blocks * step - 1) / (blocks * step) * step;
}

/* out += the product. scale: [strips of the call][groups of the row][32] floats, or NULL.
 * group_cols: a divisor of 128, or (no scales) anything. Uses 64 K_BLOCK bytes of the panel. */
KT_INLINE void kt_bf16_add_product(const kt_form form, const kt_bf16_kernels *kernels,
                                   const kt_line_tables *tables, const kt_weight *w, int64_t strip,
                                   int64_t strips, int64_t group_cols, const float *scale,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  const int64_t tile_size = 2 * KT_BF16_HALF_TILE / KT_LINES_OF(form);
  const int64_t strip_size = w->cols / KT_TILE_COLS * tile_size;
  const int64_t k_block = tokens <= KT_BF16_WHOLE ? w->cols : kt_bf16_k_block(w->cols);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    const int64_t groups = scale ? cols / group_cols : 1, tiles = cols / KT_TILE_COLS;
    for (int64_t s = 0; s < strips; s++) {
      const uint8_t *const codes =
          w->codes + (strip + s) * strip_size + k / KT_TILE_COLS * tile_size;
      const float *const scales =
          scale ? scale + (s * (w->cols / group_cols) + k / group_cols) * KT_STRIP : NULL;
      kt_bf16_strip(kernels, tables, codes, groups, tiles / groups, scales, x + 2 * k, stride,
                    tokens, out + s * tokens * KT_STRIP, panel);
    }
  }
}

KT_INLINE void kt_bf16_product(const kt_form form, const kt_bf16_kernels *kernels,
                               const kt_line_tables *tables, const kt_weight *w, int64_t strip,
                               int64_t strips, int64_t group_cols, const float *scale,
                               const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                               uint8_t *panel) {
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  kt_bf16_add_product(form, kernels, tables, w, strip, strips, group_cols, scale, x, stride, tokens,
                      out, panel);
}

#endif
