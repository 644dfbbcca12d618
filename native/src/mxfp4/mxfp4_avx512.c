/* MXFP4 products with AVX-512 BF16.
 *
 * A packed line becomes four lines of bf16 in registers (mxfp4.h). Micro kernel: up to 6 tokens
 * x 32 rows, 12 sums of the group and 12 totals in registers. More tokens are done in blocks,
 * each of which decodes again: shuffles and VDPBF16PS run side by side, so that costs nothing
 * (Zen 4: 211 of 234 GFLOPS; 196 with 12 tokens that share decoded lines, totals in memory).
 *
 * One or two tokens would wait for their chains of sums, so they do two groups at a time. As
 * that jumps between two places, lines are prefetched in ascending order. (One token from
 * DRAM, Zen 4, which reads 35 GB/s: 33 GB/s; 31 with one group at a time, 27 without
 * prefetching, 18 with two and without.)
 *
 * In all cases an element is one chain over the columns of each group and one over groups: its
 * bits do not depend on the batch. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../simd/unroll.h"
#include "mxfp4.h"

enum {
  BLOCK = 6,      /* tokens of the micro kernel */
  FEW = 2,        /* tokens that do two groups at a time */
  K_BLOCK = 2048, /* columns: for more tokens, their activations and a strip stay in L2 */
  AHEAD = 8192,   /* bytes from what is read to what is prefetched */
  LINES = KT_MXFP4_TILE / KT_LINE
};

/* Some columns of a strip: whole groups. */
typedef struct columns {
  const uint8_t *codes;
  const void *scale; /* of the first group */
  int32_t scale_dtype;
  int64_t groups;
} columns;

/* Not by VBROADCASTSS, which clang takes: on Zen 4 that is in the way of other shuffles. */
KT_INLINE __m512i broadcast(const uint8_t *x) {
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
KT_INLINE void prefetch(const uint8_t *codes) {
  __builtin_prefetch((const void *)((uintptr_t)codes + AHEAD), 0, 2);
}

/* 16 packed scales as floats. UE8M0: the byte is the exponent; 0 means 2^-127, the one
 * denormal. */
KT_INLINE __m512 load_scales(int32_t dtype, const void *scale, int64_t at) {
  if (dtype == KT_SCALE_BF16) {
    const uint16_t *const from = (const uint16_t *)scale + at;
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  const uint8_t *const from = (const uint8_t *)scale + at;
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)from);
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
}

/* Columns 0 and 1 (or, upper, 2 and 3) of a packed line: bf16 of rows 0..15 and of 16..31.
 * VPERMW looks at 5 bits of a word: the nibble and one bit that the table ignores. */
KT_INLINE void decode(__m512i table, __m512i line, const int upper, __m512i *line0,
                      __m512i *line1) {
  const __m512i v0 = upper ? _mm512_srli_epi16(line, 8) : line;
  const __m512i v1 = upper ? _mm512_srli_epi16(line, 12) : _mm512_srli_epi16(line, 4);
  *line0 = _mm512_permutexvar_epi16(v0, table);
  *line1 = _mm512_permutexvar_epi16(v1, table);
}

static __m512i make_table(void) {
  const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)kt_mxfp4_bf16);
  return _mm512_broadcast_i64x4(words);
}

/* What scales of 16 rows add to bf16 bits: (code - 127) << 7, twice for each row. */
KT_INLINE __m512i exponents_of(const uint8_t *scale) {
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)scale);
  const __m512i steps = _mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), _mm512_set1_epi32(127));
  const __m512i high = _mm512_slli_epi32(steps, 23);
  return _mm512_or_si512(high, _mm512_srli_epi32(high, 16));
}

/* Zeros stay as they are. */
KT_INLINE __m512i scaled_line(__m512i line, __m512i exponents) {
  const __mmask32 nonzero = _mm512_test_epi16_mask(line, _mm512_set1_epi16(0x7fff));
  return _mm512_mask_add_epi16(line, nonzero, line, exponents);
}

void kt_mxfp4_decode_tiles(const uint8_t *codes, const uint8_t *exponents, int64_t tiles,
                           uint8_t *out) {
  const __m512i table = make_table();
  __m512i add0 = _mm512_setzero_si512(), add1 = add0;
  for (int64_t i = 0; i < tiles; i++, out += KT_BF16_TILE) {
    if (exponents) {
      add0 = exponents_of(exponents + i * KT_STRIP);
      add1 = exponents_of(exponents + i * KT_STRIP + 16);
    }
    for (int p = 0; p < 2 * LINES; p++) {
      __m512i line0, line1;
      const __m512i line = _mm512_loadu_si512(codes + i * KT_MXFP4_TILE + p / 2 * KT_LINE);
      decode(table, line, p % 2, &line0, &line1);
      _mm512_store_si512(out + p * KT_LINE, scaled_line(line0, add0));
      _mm512_store_si512(out + KT_BF16_HALF_TILE + p * KT_LINE, scaled_line(line1, add1));
    }
  }
}

void kt_mxfp4_decode_scales(const kt_weight *w, int64_t first, int64_t count, float *out) {
  for (int64_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(out + i, load_scales(w->layout.scale_dtype, w->scale, first + i));
}

#define DOT(sum, line, pair) _mm512_dpbf16_ps(sum, (__m512bh)(line), (__m512bh)(pair))

#define EACH_GROUP                                                                                 \
  KT_UNROLL(2)                                                                                     \
  for (int i = 0; i < 2; i++)                                                                      \
    if (i < together)

#define EACH_TOKEN                                                                                 \
  KT_UNROLL(6)                                                                                     \
  for (int t = 0; t < BLOCK; t++)                                                                  \
    if (t < tokens)

/* Compilers must not go ahead of what is written, since they run out of registers. */
#define IN_ORDER(pair) __asm__ volatile("" : "+v"((pair)[0]), "+v"((pair)[1]) : : "memory")

/* out[t][32 rows] += w * x[t], groups first to end (`together` divides their number). */
KT_INLINE void micro(const int tokens, const int together, __m512i table, const columns *w,
                     int64_t first, int64_t end, const uint8_t *x, int64_t stride, float *out) {
  const uint8_t *base = x + first * KT_MXFP4_GROUP * 2, *base3 = base + 3 * stride;
  const uint8_t *at = w->codes + first * KT_MXFP4_TILE;
  __m512 sum[BLOCK][2][2], total[BLOCK][2];
  EACH_TOKEN {
    total[t][0] = _mm512_loadu_ps(out + t * KT_STRIP);
    total[t][1] = _mm512_loadu_ps(out + t * KT_STRIP + 16);
  }
  for (int64_t g = first; g < end; g += together) {
    EACH_TOKEN EACH_GROUP sum[t][i][0] = sum[t][i][1] = _mm512_setzero_ps();
    KT_UNROLL(8)
    for (int p = 0; p < LINES; p++) {
      EACH_GROUP {
        const __m512i line = _mm512_loadu_si512(at + i * KT_MXFP4_TILE + p * KT_LINE);
        prefetch(at + (p * together + i) * KT_LINE);
        KT_UNROLL(2)
        for (int upper = 0; upper < 2; upper++) {
          __m512i line0, line1;
          decode(table, line, upper, &line0, &line1);
          EACH_TOKEN {
            const __m512i pair = broadcast((t < 3 ? base : base3) + t % 3 * stride +
                                           i * KT_MXFP4_GROUP * 2 + p * 8 + upper * 4);
            sum[t][i][0] = DOT(sum[t][i][0], line0, pair);
            sum[t][i][1] = DOT(sum[t][i][1], line1, pair);
            IN_ORDER(sum[t][i]);
          }
        }
      }
    }
    at += together * KT_MXFP4_TILE;
    base += together * KT_MXFP4_GROUP * 2;
    base3 += together * KT_MXFP4_GROUP * 2;
    EACH_GROUP {
      const __m512 scale0 = load_scales(w->scale_dtype, w->scale, (g + i) * KT_STRIP);
      const __m512 scale1 = load_scales(w->scale_dtype, w->scale, (g + i) * KT_STRIP + 16);
      EACH_TOKEN {
        total[t][0] = _mm512_fmadd_ps(sum[t][i][0], scale0, total[t][0]);
        total[t][1] = _mm512_fmadd_ps(sum[t][i][1], scale1, total[t][1]);
      }
    }
  }
  EACH_TOKEN {
    _mm512_storeu_ps(out + t * KT_STRIP, total[t][0]);
    _mm512_storeu_ps(out + t * KT_STRIP + 16, total[t][1]);
  }
}

KT_INLINE void multiply_block(const int tokens, __m512i table, const columns *w, const uint8_t *x,
                              int64_t stride, float *out) {
  const int64_t pairs = tokens <= FEW ? w->groups / 2 * 2 : 0;
  if (tokens <= FEW) micro(tokens, 2, table, w, 0, pairs, x, stride, out);
  if (pairs < w->groups) micro(tokens, 1, table, w, pairs, w->groups, x, stride, out);
}

/* Some columns of a strip for all tokens, in blocks of nearly equal size. */
static void multiply_strip(__m512i table, const columns *w, const uint8_t *x, int64_t stride,
                           int64_t tokens, float *out) {
  const int64_t blocks = (tokens + BLOCK - 1) / BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t t = tokens * b / blocks, end = tokens * (b + 1) / blocks;
    const uint8_t *const row = x + t * stride;
    float *const to = out + t * KT_STRIP;
    switch (end - t) {
    case 1: multiply_block(1, table, w, row, stride, to); break;
    case 2: multiply_block(2, table, w, row, stride, to); break;
    case 3: multiply_block(3, table, w, row, stride, to); break;
    case 4: multiply_block(4, table, w, row, stride, to); break;
    case 5: multiply_block(5, table, w, row, stride, to); break;
    case 6: multiply_block(6, table, w, row, stride, to); break;
    }
  }
}

void kt_mxfp4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const __m512i table = make_table();
  const int64_t scale_size = w->layout.scale_dtype == KT_SCALE_BF16 ? 2 : 1;
  const int64_t k_block = tokens <= BLOCK ? w->cols : K_BLOCK;
  (void)panel;
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    for (int64_t s = 0; s < strips; s++) {
      const int64_t n = (strip + s) * KT_STRIP;
      const columns c = {w->codes + kt_bf16_tile_start(w->cols, KT_MXFP4_TILE, n, k),
                         (const uint8_t *)w->scale +
                             kt_group_scale_index(w->cols, KT_MXFP4_GROUP, n, k / KT_MXFP4_GROUP) *
                                 scale_size,
                         w->layout.scale_dtype, cols / KT_MXFP4_GROUP};
      multiply_strip(table, &c, x + 2 * k, stride, tokens, out + s * tokens * KT_STRIP);
    }
  }
}

KT_TARGET_END
#endif
