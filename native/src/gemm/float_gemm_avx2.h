/* float_gemm_avx2.h - products with bf16 activations for AVX2: tiles of a strip are decoded to
 * binary32, column after column, once for all tokens of a call, and so are activations.
 *
 * Per group of columns with scales of their own, sums start at 0 and are added to `out` by one
 * fused operation each; without scales they go on from `out`. An element is one chain over
 * ascending columns: its bits do not depend on the batch. Include after KT_TARGET_BEGIN(AVX2). */
#ifndef KT_FLOAT_GEMM_AVX2_H
#define KT_FLOAT_GEMM_AVX2_H

#include "../simd/unroll.h"
#include "bf16_gemm.h"

enum {
  KT_FLOAT_K_BLOCK = 256, /* columns: a strip of them is 32 KiB */
  KT_FLOAT_BLOCK = 2,     /* tokens of the micro kernel: 8 sums of 16 registers; 12 are slower */
  KT_FLOAT_X_SIZE = KT_MAX_TOKENS * KT_FLOAT_K_BLOCK * 4
};
_Static_assert(KT_FLOAT_X_SIZE + KT_FLOAT_K_BLOCK * KT_STRIP * 4 <= KT_PANEL_SIZE,
               "activations and weights of a block lie in the panel");

/* Codes of 32 x 32 from (row n, column k) on as out[column][32 rows]. */
typedef void kt_float_tile_fn(const kt_weight *w, int64_t n, int64_t k, float *out);

/* Scales of 32 rows from row n on, for the group of columns from column k on. */
typedef void kt_float_scales_fn(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]);

#define KT_FLOAT_EACH_TOKEN                                                                        \
  KT_UNROLL(2)                                                                                     \
  for (int t = 0; t < KT_FLOAT_BLOCK; t++)                                                         \
    if (t < tokens)

#define KT_FLOAT_EACH_PART                                                                         \
  KT_UNROLL(4)                                                                                     \
  for (int i = 0; i < 4; i++)

/* out[t][32 rows] += w[cols][32 rows] * x[t][cols]; scale: NULL, or of the rows. */
KT_INLINE void kt_float_micro(const int tokens, const float *w, const float *x, int64_t cols,
                              const float *scale, float *out) {
  __m256 sum[KT_FLOAT_BLOCK][4];
  KT_FLOAT_EACH_TOKEN KT_FLOAT_EACH_PART sum[t][i] =
      scale ? _mm256_setzero_ps() : _mm256_loadu_ps(out + t * KT_STRIP + 8 * i);
  for (int64_t k = 0; k < cols; k++, w += KT_STRIP) {
    __m256 line[4];
    KT_FLOAT_EACH_PART line[i] = _mm256_loadu_ps(w + 8 * i);
    KT_FLOAT_EACH_TOKEN {
      const __m256 one = _mm256_broadcast_ss(x + t * KT_FLOAT_K_BLOCK + k);
      KT_FLOAT_EACH_PART sum[t][i] = _mm256_fmadd_ps(one, line[i], sum[t][i]);
    }
  }
  KT_FLOAT_EACH_TOKEN KT_FLOAT_EACH_PART {
    float *const to = out + t * KT_STRIP + 8 * i;
    const __m256 scaled =
        scale ? _mm256_fmadd_ps(sum[t][i], _mm256_loadu_ps(scale + 8 * i), _mm256_loadu_ps(to))
              : sum[t][i];
    _mm256_storeu_ps(to, scaled);
  }
}

KT_INLINE void kt_float_tokens(const float *w, const float *x, int64_t cols, const float *scale,
                               int64_t tokens, float *out) {
  int64_t t = 0;
  for (; t + 1 < tokens; t += 2)
    kt_float_micro(2, w, x + t * KT_FLOAT_K_BLOCK, cols, scale, out + t * KT_STRIP);
  if (t < tokens) kt_float_micro(1, w, x + t * KT_FLOAT_K_BLOCK, cols, scale, out + t * KT_STRIP);
}

/* bf16 as binary32; cols % 8 == 0. */
KT_INLINE void kt_float_row(const uint8_t *row, int64_t cols, float *out) {
  for (int64_t k = 0; k < cols; k += 8) {
    const __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)(row + 2 * k));
    _mm256_storeu_ps(out + k,
                     _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  }
}

/* kt_product_fn, but for scales that are not those of groups. decode and scales are constants;
 * group: columns that share one, a divisor of K_BLOCK; without `scales` it does not matter. */
KT_INLINE void kt_float_product(kt_float_tile_fn *decode, kt_float_scales_fn *scales, int64_t group,
                                const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                                int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  float *const rows = (float *)(void *)panel, *const tiles = rows + KT_FLOAT_X_SIZE / 4;
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    cols = w->cols - k < KT_FLOAT_K_BLOCK ? w->cols - k : KT_FLOAT_K_BLOCK;
    for (int64_t t = 0; t < tokens; t++)
      kt_float_row(x + t * stride + 2 * k, cols, rows + t * KT_FLOAT_K_BLOCK);
    for (int64_t s = 0; s < strips; s++) {
      const int64_t n = (strip + s) * KT_STRIP;
      float *const to = out + s * tokens * KT_STRIP;
      for (int64_t c = 0; c < cols; c += KT_TILE_COLS) decode(w, n, k + c, tiles + c * KT_STRIP);
      if (!scales) {
        kt_float_tokens(tiles, rows, cols, NULL, tokens, to);
        continue;
      }
      for (int64_t c = 0; c < cols; c += group) {
        float scale[KT_STRIP];
        scales(w, n, k + c, scale);
        kt_float_tokens(tiles + c * KT_STRIP, rows + c, group, scale, tokens, to);
      }
    }
  }
}

/* out[s][t][32 rows] *= scale of the rows. */
KT_INLINE void kt_float_scale_rows(const kt_weight *w, int64_t strip, int64_t strips,
                                   int64_t tokens, float *out) {
  for (int64_t s = 0; s < strips; s++) {
    const float *const scale = (const float *)w->scale + (strip + s) * KT_STRIP;
    for (int64_t t = 0; t < tokens; t++, out += KT_STRIP)
      for (int i = 0; i < KT_STRIP; i += 8)
        _mm256_storeu_ps(out + i,
                         _mm256_mul_ps(_mm256_loadu_ps(out + i), _mm256_loadu_ps(scale + i)));
  }
}

/* 32 scales that are powers of two (UE8M0): the byte is the exponent; 0 means 2^-127, the one
 * denormal. */
KT_INLINE void kt_float_powers(const uint8_t *codes, float scale[KT_STRIP]) {
  for (int r = 0; r < KT_STRIP; r += 8) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(codes + r));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
    const __m256i least = _mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000));
    _mm256_storeu_ps(scale + r, _mm256_castsi256_ps(least));
  }
}

/* Numbers of E4M3 in the upper bytes of 8 words, as binary32: as halves of the same mantissa, whose
 * exponents are 8 smaller. */
KT_INLINE __m256 kt_float_e4m3(__m128i words) {
  const __m128i halves = _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16((short)0xbf80));
  return _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0f));
}

#endif
