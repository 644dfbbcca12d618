/* fp4_gemm_avx512.h - products of E2M1 weights with AVX-512 BF16.
 *
 * A packed line becomes four lines of bf16 in registers (fp4.h). Micro kernel: up to 6 tokens
 * x 32 rows, 12 sums of the group and 12 totals in registers. More tokens are done in blocks,
 * each of which decodes again: shuffles and VDPBF16PS run side by side, so that costs nothing
 * (MXFP4, Zen 4: 211 of 234 GFLOPS; 196 with 12 tokens that share decoded lines, totals in memory).
 *
 * One or two tokens would wait for their chains of sums, so they do two groups at a time. Where
 * that jumps between two places, lines are prefetched in ascending order. (MXFP4, one token from
 * DRAM, Zen 4, which reads 35 GB/s: 33 GB/s; 31 with one group at a time, 27 without
 * prefetching, 18 with two and without.)
 *
 * In all cases an element is one chain over the columns of each group and one over groups: its
 * bits do not depend on the batch. Include after KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_FP4_GEMM_AVX512_H
#define KT_FP4_GEMM_AVX512_H

#include "../simd/unroll.h"
#include "fp4.h"

enum {
  KT_FP4_BLOCK = 6,      /* tokens of the micro kernel */
  KT_FP4_FEW = 2,        /* tokens that do two groups at a time */
  KT_FP4_K_BLOCK = 2048, /* columns: for more tokens, their activations and a strip stay in L2 */
  KT_FP4_AHEAD = 8192    /* bytes from what is read to what is prefetched */
};

/* Some columns of a strip: whole tiles. */
typedef struct kt_fp4_columns {
  const uint8_t *codes;
  const void *scale; /* of the first group */
  int32_t scale_dtype;
  int64_t tiles;
} kt_fp4_columns;

/* Scales of 16 rows, from `row` on, of group `group` (in all of w, which begins with tile 0) in the
 * tile at `tile`. */
typedef __m512 kt_fp4_scales_fn(const kt_fp4_columns *w, const uint8_t *tile, int64_t group,
                                int row);

/* What tells formats apart: constants of a micro kernel. */
typedef struct kt_fp4_form {
  int tile_size;   /* bytes */
  int tile_groups; /* groups of columns with scales of their own: 1 or 2 */
  kt_fp4_scales_fn *scales;
} kt_fp4_form;

/* Not by VBROADCASTSS, which clang takes: on Zen 4 that is in the way of other shuffles. */
KT_INLINE __m512i kt_fp4_broadcast(const uint8_t *x) {
  __m512i pair;
#if defined(__clang__)
  __asm__("vpbroadcastd %1, %0" : "=v"(pair) : "m"(*(const uint8_t (*)[4])x));
#else
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  pair = _mm512_set1_epi32(word);
#endif
  return pair;
}

/* Into L2; past the end of the codes it does nothing. */
KT_INLINE void kt_fp4_prefetch(const uint8_t *codes) {
  __builtin_prefetch((const void *)((uintptr_t)codes + KT_FP4_AHEAD), 0, 2);
}

/* Columns 0 and 1 (or, upper, 2 and 3) of a packed line: bf16 of rows 0..15 and of 16..31.
 * VPERMW looks at 5 bits of a word: the nibble and one bit that the table ignores. */
KT_INLINE void kt_fp4_decode(__m512i table, __m512i line, const int upper, __m512i *line0,
                             __m512i *line1) {
  const __m512i v0 = upper ? _mm512_srli_epi16(line, 8) : line;
  const __m512i v1 = upper ? _mm512_srli_epi16(line, 12) : _mm512_srli_epi16(line, 4);
  *line0 = _mm512_permutexvar_epi16(v0, table);
  *line1 = _mm512_permutexvar_epi16(v1, table);
}

KT_INLINE __m512i kt_fp4_table(void) {
  const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)kt_fp4_bf16);
  return _mm512_broadcast_i64x4(words);
}

#define KT_FP4_DOT(sum, line, pair) _mm512_dpbf16_ps(sum, (__m512bh)(line), (__m512bh)(pair))

#define KT_FP4_EACH_GROUP                                                                          \
  KT_UNROLL(2)                                                                                     \
  for (int i = 0; i < 2; i++)                                                                      \
    if (i < together)

#define KT_FP4_EACH_TOKEN                                                                          \
  KT_UNROLL(6)                                                                                     \
  for (int t = 0; t < KT_FP4_BLOCK; t++)                                                           \
    if (t < tokens)

/* Compilers must not go ahead of what is written, since they run out of registers. */
#define KT_FP4_IN_ORDER(pair) __asm__ volatile("" : "+v"((pair)[0]), "+v"((pair)[1]) : : "memory")

/* out[t][32 rows] += w * x[t], tiles first to end. `together` groups are done at a time, those of a
 * tile or of as many tiles (which then divides their number). */
KT_INLINE void kt_fp4_micro(const kt_fp4_form form, const int tokens, const int together,
                            __m512i table, const kt_fp4_columns *w, int64_t first, int64_t end,
                            const uint8_t *x, int64_t stride, float *out) {
  const int lines = KT_FP4_LINES / form.tile_groups, group_cols = KT_TILE_COLS / form.tile_groups;
  const int tiles = form.tile_groups == 1 ? together : 1;
  const int rounds = form.tile_groups == 1 ? 1 : form.tile_groups / together;
  const int apart = form.tile_groups == 1 ? form.tile_size : lines * KT_LINE;
  const uint8_t *base = x + first * KT_TILE_COLS * 2, *base3 = base + 3 * stride;
  const uint8_t *tile = w->codes + first * form.tile_size;
  __m512 sum[KT_FP4_BLOCK][2][2], total[KT_FP4_BLOCK][2];
  KT_FP4_EACH_TOKEN {
    total[t][0] = _mm512_loadu_ps(out + t * KT_STRIP);
    total[t][1] = _mm512_loadu_ps(out + t * KT_STRIP + 16);
  }
  int64_t group = first * form.tile_groups;
  for (int64_t at = first; at < end; at += tiles, tile += tiles * form.tile_size) {
    KT_UNROLL(2)
    for (int round = 0; round < rounds; round++) {
      const uint8_t *const codes = tile + round * apart;
      KT_FP4_EACH_TOKEN KT_FP4_EACH_GROUP sum[t][i][0] = sum[t][i][1] = _mm512_setzero_ps();
      KT_UNROLL(8)
      for (int p = 0; p < lines; p++) {
        KT_FP4_EACH_GROUP {
          const __m512i line = _mm512_loadu_si512(codes + i * apart + p * KT_LINE);
          kt_fp4_prefetch(codes + (p * together + i) * KT_LINE);
          KT_UNROLL(2)
          for (int upper = 0; upper < 2; upper++) {
            __m512i line0, line1;
            kt_fp4_decode(table, line, upper, &line0, &line1);
            KT_FP4_EACH_TOKEN {
              const __m512i pair =
                  kt_fp4_broadcast((t < 3 ? base : base3) + t % 3 * stride + i * group_cols * 2 +
                                   p * 2 * KT_FP4_LINE_COLS + upper * 4);
              sum[t][i][0] = KT_FP4_DOT(sum[t][i][0], line0, pair);
              sum[t][i][1] = KT_FP4_DOT(sum[t][i][1], line1, pair);
              KT_FP4_IN_ORDER(sum[t][i]);
            }
          }
        }
      }
      base += together * group_cols * 2;
      base3 += together * group_cols * 2;
      KT_FP4_EACH_GROUP {
        const __m512 scale0 = form.scales(w, tile, group + i, 0);
        const __m512 scale1 = form.scales(w, tile, group + i, KT_HALF_ROWS);
        KT_FP4_EACH_TOKEN {
          total[t][0] = _mm512_fmadd_ps(sum[t][i][0], scale0, total[t][0]);
          total[t][1] = _mm512_fmadd_ps(sum[t][i][1], scale1, total[t][1]);
        }
      }
      group += together;
    }
  }
  KT_FP4_EACH_TOKEN {
    _mm512_storeu_ps(out + t * KT_STRIP, total[t][0]);
    _mm512_storeu_ps(out + t * KT_STRIP + 16, total[t][1]);
  }
}

KT_INLINE void kt_fp4_block(const kt_fp4_form form, const int tokens, __m512i table,
                            const kt_fp4_columns *w, const uint8_t *x, int64_t stride, float *out) {
  const int tiles = 2 / form.tile_groups; /* that are done at a time */
  const int64_t done = tokens <= KT_FP4_FEW ? w->tiles / tiles * tiles : 0;
  if (tokens <= KT_FP4_FEW) kt_fp4_micro(form, tokens, 2, table, w, 0, done, x, stride, out);
  if (done < w->tiles) kt_fp4_micro(form, tokens, 1, table, w, done, w->tiles, x, stride, out);
}

/* Some columns of a strip for all tokens, in blocks of nearly equal size. */
KT_INLINE void kt_fp4_strip(const kt_fp4_form form, __m512i table, const kt_fp4_columns *w,
                            const uint8_t *x, int64_t stride, int64_t tokens, float *out) {
  const int64_t blocks = (tokens + KT_FP4_BLOCK - 1) / KT_FP4_BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t t = tokens * b / blocks, end = tokens * (b + 1) / blocks;
    const uint8_t *const row = x + t * stride;
    float *const to = out + t * KT_STRIP;
    switch (end - t) {
    case 1: kt_fp4_block(form, 1, table, w, row, stride, to); break;
    case 2: kt_fp4_block(form, 2, table, w, row, stride, to); break;
    case 3: kt_fp4_block(form, 3, table, w, row, stride, to); break;
    case 4: kt_fp4_block(form, 4, table, w, row, stride, to); break;
    case 5: kt_fp4_block(form, 5, table, w, row, stride, to); break;
    case 6: kt_fp4_block(form, 6, table, w, row, stride, to); break;
    }
  }
}

/* out = w * x, but for scales that are not those of groups. scale_size: bytes of a tile's scales in
 * w->scale, 0 where they are in tiles. */
KT_INLINE void kt_fp4_product(const kt_fp4_form form, const kt_weight *w, int64_t scale_size,
                              int64_t strip, int64_t strips, const uint8_t *x, int64_t stride,
                              int64_t tokens, float *out) {
  const __m512i table = kt_fp4_table();
  const int64_t k_block = tokens <= KT_FP4_BLOCK ? w->cols : KT_FP4_K_BLOCK;
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    for (int64_t s = 0; s < strips; s++) {
      const int64_t n = (strip + s) * KT_STRIP, tile = kt_bf16_tile_start(w->cols, 1, n, k);
      const kt_fp4_columns c = {w->codes + tile * form.tile_size,
                                (const uint8_t *)w->scale + tile * scale_size,
                                w->layout.scale_dtype, cols / KT_TILE_COLS};
      kt_fp4_strip(form, table, &c, x + 2 * k, stride, tokens, out + s * tokens * KT_STRIP);
    }
  }
}

#endif
