/* Group INT4 and INT8 products with AVX-512 VNNI, by VPDPBUSD.
 *
 * VPDPBUSD wants one side unsigned: weights are code + bias, as they are stored, so the integer
 * sum of a group starts at -bias * (sum of the activations). With 4 activations of a token
 * broadcast, one instruction adds 4 columns to 16 rows.
 *
 * Micro kernel: up to 6 tokens x 32 rows, 12 integer sums of the group and 12 float totals in
 * registers; more tokens are done in blocks. (GINT4, Zen 4, K = 2048, groups of 32 / 128 columns:
 * 362 / 430 of 469 GOPS. Totals in memory with 12 tokens: 265 / 380, with 5 tokens: 340.)
 *
 * Lines are read in strictly ascending order, which is what DRAM needs (int/int_gemm_avx512.c),
 * and prefetched: one token of GINT4 reads 33 GB/s where plain reading gives 35; 29 without.
 *
 * `bits` is a constant in every call. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_VNNI)
#include "../gemm/group_scales_avx512.h"
#include "../simd/unroll.h"
#include "group.h"

enum {
  BLOCK = 6,               /* tokens of the micro kernel */
  K_BLOCK = 2048,          /* columns: for more tokens, their activations and a strip stay in L2 */
  AHEAD = 4096,            /* bytes from what is read to what is prefetched */
  LINES = KT_TILE_COLS / 4 /* of 4 columns, of a tile */
};

/* Some columns of a strip: whole groups. */
typedef struct columns {
  const uint8_t *codes;
  const void *scale; /* of the first group */
  int32_t scale_dtype;
  int64_t groups, group_tiles;
} columns;

/* The same columns of activation rows: codes, then scale and sum of the first group. */
typedef struct activations {
  const uint8_t *codes;
  const float *scale;
  const int32_t *sum;
  int64_t stride; /* bytes */
} activations;

static activations rows_from(const activations *x, int64_t t) {
  const int64_t words = t * x->stride / (int64_t)sizeof(float);
  return (activations){x->codes + t * x->stride, x->scale + words, x->sum + words, x->stride};
}

KT_INLINE __m512i broadcast(const uint8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

/* Past the end of the codes it does nothing. */
KT_INLINE void prefetch(const uint8_t *codes) {
  __builtin_prefetch((const void *)((uintptr_t)codes + AHEAD), 0, 3);
}

#define EACH_TOKEN                                                                                 \
  KT_UNROLL(6)                                                                                     \
  for (int t = 0; t < BLOCK; t++)                                                                  \
    if (t < tokens)

/* Compilers must not go ahead of what is written, since they run out of registers. */
#define IN_ORDER(pair) __asm__ volatile("" : "+v"((pair)[0]), "+v"((pair)[1]) : : "memory")

/* out[t][32 rows] += w * x[t] */
KT_INLINE void micro(const int bits, const int tokens, const columns *w, const activations *x,
                     float *out) {
  const __m512i low = _mm512_set1_epi8(15);
  const int64_t stride = x->stride, words = stride / (int64_t)sizeof(float);
  const uint8_t *base = x->codes, *base3 = base + 3 * stride, *at = w->codes;
  __m512i sum[BLOCK][2];
  __m512 total[BLOCK][2];
  EACH_TOKEN {
    total[t][0] = _mm512_loadu_ps(out + t * KT_STRIP);
    total[t][1] = _mm512_loadu_ps(out + t * KT_STRIP + 16);
  }
  for (int64_t g = 0; g < w->groups; g++) {
    EACH_TOKEN {
      const __m512i added =
          _mm512_slli_epi32(_mm512_set1_epi32(x->sum[t * words + g]), (unsigned)bits - 1);
      sum[t][0] = sum[t][1] = _mm512_sub_epi32(_mm512_setzero_si512(), added);
    }
    for (int64_t i = 0; i < w->group_tiles; i++) {
      KT_UNROLL(8)
      for (int p = 0; p < LINES; p++) {
        const uint8_t *const from = at + p * (bits / 4) * KT_LINE;
        const __m512i line = _mm512_loadu_si512(from);
        const __m512i w0 = bits == 4 ? _mm512_and_si512(line, low) : line;
        const __m512i w1 = bits == 4 ? _mm512_and_si512(_mm512_srli_epi16(line, 4), low)
                                     : _mm512_loadu_si512(from + KT_LINE);
        prefetch(from);
        if (bits == 8) prefetch(from + KT_LINE);
        EACH_TOKEN {
          const __m512i four = broadcast((t < 3 ? base : base3) + t % 3 * stride + p * 4);
          sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], w0, four);
          sum[t][1] = _mm512_dpbusd_epi32(sum[t][1], w1, four);
          IN_ORDER(sum[t]);
        }
      }
      at += KT_GROUP_TILE(bits);
      base += KT_TILE_COLS;
      base3 += KT_TILE_COLS;
    }
    const __m512 scale0 = kt_group_load_scales(w->scale_dtype, w->scale, g * KT_STRIP);
    const __m512 scale1 = kt_group_load_scales(w->scale_dtype, w->scale, g * KT_STRIP + 16);
    EACH_TOKEN {
      const __m512 x_scale = _mm512_set1_ps(x->scale[t * words + g]);
      total[t][0] = kt_group_add(total[t][0], sum[t][0], scale0, x_scale);
      total[t][1] = kt_group_add(total[t][1], sum[t][1], scale1, x_scale);
    }
  }
  EACH_TOKEN {
    _mm512_storeu_ps(out + t * KT_STRIP, total[t][0]);
    _mm512_storeu_ps(out + t * KT_STRIP + 16, total[t][1]);
  }
}

/* For all tokens, in blocks of nearly equal size. */
KT_INLINE void multiply_strip(const int bits, const columns *w, const activations *x,
                              int64_t tokens, float *out) {
  const int64_t blocks = (tokens + BLOCK - 1) / BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t t = tokens * b / blocks, end = tokens * (b + 1) / blocks;
    const activations rows = rows_from(x, t);
    float *const to = out + t * KT_STRIP;
    switch (end - t) {
    case 1: micro(bits, 1, w, &rows, to); break;
    case 2: micro(bits, 2, w, &rows, to); break;
    case 3: micro(bits, 3, w, &rows, to); break;
    case 4: micro(bits, 4, w, &rows, to); break;
    case 5: micro(bits, 5, w, &rows, to); break;
    case 6: micro(bits, 6, w, &rows, to); break;
    }
  }
}

KT_INLINE void product(const int bits, const kt_weight *w, int64_t strip, int64_t strips,
                       const uint8_t *x, int64_t stride, int64_t tokens, float *out) {
  const int64_t group = w->layout.group, groups = w->cols / group;
  const int64_t scale_size = w->layout.scale_dtype == KT_SCALE_F32 ? 4 : 2;
  const int64_t k_block = tokens <= BLOCK ? w->cols : K_BLOCK;
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    const int64_t g = k / group;
    const activations rows = {x + k, kt_group_x_scale(x, w->cols) + g,
                              kt_group_x_sum(x, w->cols, groups) + g, stride};
    for (int64_t s = 0; s < strips; s++) {
      const int64_t n = (strip + s) * KT_STRIP;
      const columns c = {w->codes + kt_bf16_tile_start(w->cols, KT_GROUP_TILE(bits), n, k),
                         (const uint8_t *)w->scale +
                             kt_group_scale_index(w->cols, group, n, g) * scale_size,
                         w->layout.scale_dtype, cols / group, group / KT_TILE_COLS};
      multiply_strip(bits, &c, &rows, tokens, out + s * tokens * KT_STRIP);
    }
  }
}

void kt_gint4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  (void)panel;
  product(4, w, strip, strips, x, stride, tokens, out);
}

void kt_gint8_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  (void)panel;
  product(8, w, strip, strips, x, stride, tokens, out);
}

KT_TARGET_END
#endif
