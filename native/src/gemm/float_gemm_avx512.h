/* float_gemm_avx512.h - products with bf16 activations by fused multiply-adds of AVX-512: for CPUs
 * without VDPBF16PS, and for those where it is slow. (Emerald Rapids at 3.1 GHz starts a VDPBF16PS
 * of 32 products every 2 cycles, and two multiply-adds of 16 in each: twice as much. Zen 4 starts
 * one VDPBF16PS or one multiply-add per cycle.)
 *
 * Activations become binary32 once per call and block of columns. Up to 12 tokens read packed
 * weights and decode them in registers; blocks of more tokens share what was decoded to the panel.
 *
 * Per group of columns with scales of their own, sums start at 0 and are added to `out` by one
 * fused operation each; without scales they go on from `out`. An element is one chain over
 * ascending columns, as with AVX2 (float_gemm_avx2.h): its bits do not depend on the batch. One or
 * two tokens would wait for their chains where groups are small, so they do two groups at a time.
 *
 * Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_FLOAT_GEMM_AVX512_H
#define KT_FLOAT_GEMM_AVX512_H

#include "../simd/unroll.h"
#include "bf16_gemm.h"

enum {
  KT_FLOAT_BLOCK = 12,    /* tokens of the micro kernel: 24 sums of 32 registers */
  KT_FLOAT_FEW = 2,       /* tokens that do two groups at a time */
  KT_FLOAT_K_BLOCK = 128, /* columns that are decoded to the panel: 32 KiB of a strip */
  KT_FLOAT_PAD = 16,      /* floats behind a row of activations: not all in one set of the cache */
  KT_FLOAT_TILES = KT_FLOAT_K_BLOCK * KT_STRIP, /* floats of the panel before activations */
  KT_FLOAT_AHEAD = 8192                         /* bytes by which most formats are prefetched */
};
_Static_assert((KT_FLOAT_TILES + KT_MAX_TOKENS * (KT_FLOAT_K_BLOCK + KT_FLOAT_PAD)) * 4 <=
                   KT_PANEL_SIZE,
               "weights and activations of a block lie in the panel");

/* Columns 2q and 2q + 1 of a tile: line[0] and [1] are rows 0..15 and 16..31 of the first, [2] and
 * [3] of the second. */
typedef void kt_float_lines_fn(const uint8_t *tile, const int q, __m512 line[4]);

/* Scales of the 32 rows from row n on, for the group of columns from column k on. */
typedef void kt_float_scales_fn(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]);

/* What tells formats apart: constants of a micro kernel. */
typedef struct kt_float_form {
  int tile_size; /* bytes */
  int group;     /* columns that share a scale: 16, or a multiple of 32; 0: all */
  kt_float_lines_fn *lines;
  kt_float_scales_fn *scales; /* of groups */
  int ahead;                  /* bytes by which weights are prefetched; 0: KT_FLOAT_AHEAD */
  float before;               /* by what sums of groups are multiplied before; 0: by nothing */
} kt_float_form;

#define KT_FLOAT_EACH_TOKEN                                                                        \
  KT_UNROLL(12)                                                                                    \
  for (int t = 0; t < KT_FLOAT_BLOCK; t++)                                                         \
    if (t < tokens)

#define KT_FLOAT_EACH_GROUP                                                                        \
  KT_UNROLL(2)                                                                                     \
  for (int i = 0; i < 2; i++)                                                                      \
    if (i < together)

/* One activation for 16 rows. Compilers would load it once for each use. */
KT_INLINE __m512 kt_float_one(const float *x) {
  __m512 one;
  __asm__("vbroadcastss %1, %0" : "=v"(one) : "m"(*x));
  return one;
}

/* What columns 2q and 2q + 1 of a tile `ahead` will need; past the end of the codes it does
 * nothing. */
KT_INLINE void kt_float_prefetch(const kt_float_form form, const uint8_t *tile, const int q) {
  const int size = form.tile_size / (KT_TILE_COLS / 2); /* of these columns */
  const int ahead = form.ahead ? form.ahead : KT_FLOAT_AHEAD;
  const uintptr_t from = (uintptr_t)tile + (uintptr_t)(ahead + q * size);
  if (size >= KT_LINE || q % 2 == 0)
    for (int i = 0; i < size; i += KT_LINE) __builtin_prefetch((const void *)(from + (uintptr_t)i));
}

/* out[t][32 rows] += w[32 rows][cols] * x[t][cols], from column k of row n on; `at`: the codes of
 * these columns, or (decoded) their numbers as [columns][32 rows]. */
KT_INLINE void kt_float_micro(const kt_float_form form, const int tokens, const int together,
                              const int decoded, const kt_weight *w, int64_t n, int64_t k,
                              const uint8_t *at, int64_t cols, const float *x, int64_t stride,
                              float *out) {
  const int step = form.group && form.group < KT_TILE_COLS ? form.group : KT_TILE_COLS;
  const int64_t group = form.group ? form.group : cols;
  const float *const base[4] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride};
  __m512 sum[KT_FLOAT_BLOCK][2][2];
  for (int64_t c = 0; c < cols; c += group * together) {
    KT_FLOAT_EACH_TOKEN KT_FLOAT_EACH_GROUP {
      sum[t][i][0] = form.group ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * KT_STRIP);
      sum[t][i][1] = form.group ? _mm512_setzero_ps() : _mm512_loadu_ps(out + t * KT_STRIP + 16);
    }
    for (int64_t p = 0; p < group; p += step)
      for (int first = 0; first < step / 2; first += 8) {
        KT_UNROLL(8)
        for (int q = first; q < first + 8; q++) {
          KT_FLOAT_EACH_GROUP {
            const int64_t column = c + i * group + p;
            __m512 line[4];
            if (decoded) {
              const float *const from =
                  (const float *)(const void *)at + (column + 2 * q) * KT_STRIP;
              for (int j = 0; j < 4; j++) line[j] = _mm512_loadu_ps(from + 16 * j);
            } else {
              const uint8_t *const tile = at + column / KT_TILE_COLS * form.tile_size;
              kt_float_prefetch(form, tile, q + (int)(column % KT_TILE_COLS / 2));
              form.lines(tile, q + (int)(column % KT_TILE_COLS / 2), line);
            }
            KT_FLOAT_EACH_TOKEN {
              const float *const from = base[t / 3] + t % 3 * stride + column + 2 * q;
              const __m512 one = kt_float_one(from), other = kt_float_one(from + 1);
              sum[t][i][0] = _mm512_fmadd_ps(line[0], one, sum[t][i][0]);
              sum[t][i][1] = _mm512_fmadd_ps(line[1], one, sum[t][i][1]);
              sum[t][i][0] = _mm512_fmadd_ps(line[2], other, sum[t][i][0]);
              sum[t][i][1] = _mm512_fmadd_ps(line[3], other, sum[t][i][1]);
            }
            KT_IN_ORDER;
          }
        }
      }
    KT_FLOAT_EACH_GROUP {
      __m512 scale[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      if (form.group) form.scales(w, n, k + c + i * group, scale);
      KT_FLOAT_EACH_TOKEN for (int half = 0; half < 2; half++) {
        float *const to = out + t * KT_STRIP + 16 * half;
        __m512 all = sum[t][i][half];
        if (form.before != 0) all = _mm512_mul_ps(all, _mm512_set1_ps(form.before));
        if (form.group) all = _mm512_fmadd_ps(all, scale[half], _mm512_loadu_ps(to));
        _mm512_storeu_ps(to, all);
      }
    }
  }
}

typedef void kt_float_micro_fn(const kt_weight *w, int64_t n, int64_t k, const uint8_t *at,
                               int64_t cols, const float *x, int64_t stride, float *out);

/* Of a format, by tokens - 1: from packed weights; from decoded ones. */
typedef struct kt_float_kernels {
  kt_float_micro_fn *const *packed, *const *decoded;
} kt_float_kernels;

/* Two groups at a time as far as there are two. */
KT_INLINE void kt_float_packed(const kt_float_form form, const int tokens, const kt_weight *w,
                               int64_t n, int64_t k, const uint8_t *at, int64_t cols,
                               const float *x, int64_t stride, float *out) {
  const int pairs = form.group && form.group <= KT_TILE_COLS && tokens <= KT_FLOAT_FEW;
  const int64_t both = pairs ? cols / KT_TILE_COLS / 2 * 2 * KT_TILE_COLS : 0;
  if (pairs) kt_float_micro(form, tokens, 2, 0, w, n, k, at, both, x, stride, out);
  if (both < cols)
    kt_float_micro(form, tokens, 1, 0, w, n, k + both, at + both / KT_TILE_COLS * form.tile_size,
                   cols - both, x + both, stride, out);
}

#define KT_FLOAT_PACKED(count, name, form)                                                         \
  KT_NOINLINE void name##count(const kt_weight *w, int64_t n, int64_t k, const uint8_t *at,        \
                               int64_t cols, const float *x, int64_t stride, float *out) {         \
    kt_float_packed(form, count, w, n, k, at, cols, x, stride, out);                               \
  }

/* Blocks of several have at least half of the tokens that fit. */
#define KT_FLOAT_DECODED(count, name, form)                                                        \
  KT_NOINLINE void name##count(const kt_weight *w, int64_t n, int64_t k, const uint8_t *at,        \
                               int64_t cols, const float *x, int64_t stride, float *out) {         \
    if (count >= KT_FLOAT_BLOCK / 2)                                                               \
      kt_float_micro(form, count, 1, 1, w, n, k, at, cols, x, stride, out);                        \
  }

/* Defines kt_float_kernels `name` of a constant kt_float_form. */
#define KT_FLOAT_KERNELS(form, name)                                                               \
  KT_1_TO_12(KT_FLOAT_PACKED, name##_packed_, form)                                                \
  KT_1_TO_12(KT_FLOAT_DECODED, name##_decoded_, form)                                              \
  static kt_float_micro_fn *const name##_packed[] = {KT_1_TO_12(KT_NUMBERED, name##_packed_)};     \
  static kt_float_micro_fn *const name##_decoded[] = {KT_1_TO_12(KT_NUMBERED, name##_decoded_)};   \
  static const kt_float_kernels name = {name##_packed, name##_decoded};

/* bf16 as binary32; cols % 16 == 0. */
KT_INLINE void kt_float_row(const uint8_t *row, int64_t cols, float *out) {
  for (int64_t k = 0; k < cols; k += 16) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)(row + 2 * k));
    _mm512_storeu_ps(out + k,
                     _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
}

/* Columns of a block: all that the panel has room for, where they are decoded in registers. */
KT_INLINE int64_t kt_float_k_block(int64_t cols, int64_t tokens) {
  const int64_t room = (KT_PANEL_SIZE / 4 - KT_FLOAT_TILES) / tokens - KT_FLOAT_PAD;
  if (tokens > KT_FLOAT_BLOCK) return KT_FLOAT_K_BLOCK;
  return cols < room ? cols : room / 128 * 128;
}

/* out += w * x, but for scales that are not those of groups. `form` is a constant. */
KT_INLINE void kt_float_add_product(const kt_float_form form, const kt_float_kernels *kernels,
                                    const kt_weight *w, int64_t strip, int64_t strips,
                                    const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                    uint8_t *panel) {
  float *const tiles = (float *)(void *)panel, *const rows = tiles + KT_FLOAT_TILES;
  const int64_t k_block = kt_float_k_block(w->cols, tokens), pitch = k_block + KT_FLOAT_PAD;
  const int64_t blocks = (tokens + KT_FLOAT_BLOCK - 1) / KT_FLOAT_BLOCK;
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < k_block ? w->cols - k : k_block;
    for (int64_t t = 0; t < tokens; t++)
      kt_float_row(x + t * stride + 2 * k, cols, rows + t * pitch);
    for (int64_t s = 0; s < strips; s++) {
      const int64_t n = (strip + s) * KT_STRIP;
      const uint8_t *const codes = w->codes + kt_bf16_tile_start(w->cols, form.tile_size, n, k);
      float *const to = out + s * tokens * KT_STRIP;
      if (blocks == 1) {
        kernels->packed[tokens - 1](w, n, k, codes, cols, rows, pitch, to);
        continue;
      }
      for (int64_t c = 0; c < cols; c += KT_TILE_COLS) {
        const uint8_t *const tile = codes + c / KT_TILE_COLS * form.tile_size;
        KT_UNROLL(16)
        for (int q = 0; q < KT_TILE_COLS / 2; q++) {
          __m512 line[4];
          kt_float_prefetch(form, tile, q);
          form.lines(tile, q, line);
          for (int j = 0; j < 4; j++)
            _mm512_store_ps(tiles + (c + 2 * q) * KT_STRIP + 16 * j, line[j]);
          KT_IN_ORDER;
        }
      }
      for (int64_t b = 0, t = 0, end; b < blocks; b++, t = end) {
        end = tokens * (b + 1) / blocks;
        kernels->decoded[end - t - 1](w, n, k, (const uint8_t *)tiles, cols, rows + t * pitch,
                                      pitch, to + t * KT_STRIP);
      }
    }
  }
}

/* out = the same. */
KT_INLINE void kt_float_product(const kt_float_form form, const kt_float_kernels *kernels,
                                const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                                int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  kt_float_add_product(form, kernels, w, strip, strips, x, stride, tokens, out, panel);
}

/* Two columns of 16 rows, in turn, as binary32. */
KT_INLINE void kt_float_pairs(__m512i pairs, __m512 *even, __m512 *odd) {
  __asm__("" : "+v"(pairs)); /* else loaded once for each of the two */
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

/* Bytes of E4M3 in the upper halves of words, as halves of the same mantissa, whose exponents are 8
 * smaller: numbers are 256 times too small. */
KT_INLINE __m512i kt_float_e4m3_halves(__m512i words) {
  return _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16((short)0xbf80));
}

#endif
