/* Group INT4 products with AVX-512 VNNI: as INT4's (common/kt_gemm_avx512.h), but integer sums
 * last for a group only and are then added to float ones. */
#include "../cpu.h"

#if KT_X86
#include "../common/target_avx512_vnni.h"

#include "gint4.h"

/* With scales every 32 columns the sums leave registers often; 5 tokens leave room to overlap
 * that with the next group (measured at 64 tokens: 5 tokens 340 GOPS, 6 290, 12 255). */
enum { BLOCK = 5, K_BLOCK = 2048, TILE = 2 * KT_GINT4_HALF_TILE };

/* Of some strips' columns from k on; scales and rows are those of the whole row. */
typedef struct columns {
  int64_t groups, group_tiles, first_group;
  int32_t scale_dtype;
} columns;

KT_INLINE __m512i broadcast(const uint8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

KT_INLINE __m512i nibbles(__m512i line, const int high) {
  return _mm512_and_si512(high ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(15));
}

KT_INLINE __m512 load_scales(int32_t dtype, const void *scale, int64_t at) {
  if (dtype == KT_SCALE_F32) return _mm512_loadu_ps((const float *)scale + at);
  const uint16_t *const from = (const uint16_t *)scale + at;
  const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* The four lines of one half tile for all tokens, or (both) of both. A macro, since compilers
 * keep sums in registers only if they see all of it as one function. */
#define LINES(half, both)                                                                          \
  for (int p = 0; p < 4; p++) {                                                                    \
    const uint8_t *const at = w + (half) * KT_GINT4_HALF_TILE + p * KT_LINE;                       \
    const __m512i line0 = _mm512_loadu_si512(at);                                                  \
    const __m512i line1 = (both) ? _mm512_loadu_si512(at + KT_GINT4_HALF_TILE) : line0;            \
    _Pragma("GCC unroll 2") for (int high = 0; high < 2; high++) {                                 \
      const __m512i w0 = nibbles(line0, high), w1 = (both) ? nibbles(line1, high) : w0;            \
      _Pragma("GCC unroll 5") for (int t = 0; t < tokens; t++) {                                   \
        const __m512i four = broadcast(base[t / 3] + t % 3 * stride + high * 16 + p * 4);          \
        acc[t][half] = _mm512_dpbusd_epi32(acc[t][half], w0, four);                                \
        if (both) acc[t][1] = _mm512_dpbusd_epi32(acc[t][1], w1, four);                            \
      }                                                                                            \
    }                                                                                              \
  }

/* out[t][32 rows] += w * x[t] over the columns. scale: that of the first group; x, out: of
 * token 0; x_scale, x_sum: of token 0 and the first group. */
KT_INLINE void micro(const int ascending, const int tokens, const uint8_t *w, const columns *c,
                     const void *scale, const uint8_t *x, const float *x_scale,
                     const int32_t *x_sum, int64_t stride, float *out) {
  const uint8_t *base[(BLOCK + 2) / 3] = {x, x + 3 * stride};
  const int64_t floats = stride / (int64_t)sizeof(float);
  __m512i acc[BLOCK][2];
  for (int64_t g = 0; g < c->groups; g++) {
#pragma GCC unroll 5
    for (int t = 0; t < tokens; t++) {
      const __m512i sum = _mm512_set1_epi32(x_sum[t * floats + g]);
      acc[t][0] = acc[t][1] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sum, 3));
    }
    for (int64_t i = 0; i < c->group_tiles; i++, w += TILE) {
      if (ascending) {
#pragma GCC unroll 4
        LINES(0, 0)
        __asm__ volatile("" ::: "memory"); /* else the broadcasts are kept for the other half */
#pragma GCC unroll 4
        LINES(1, 0)
      } else {
#pragma GCC unroll 4
        LINES(0, 1)
      }
#pragma GCC unroll 4
      for (int p = 0; p < (tokens + 2) / 3; p++) base[p] += KT_TILE_COLS;
    }
    const __m512 scale0 = load_scales(c->scale_dtype, scale, g * KT_STRIP);
    const __m512 scale1 = load_scales(c->scale_dtype, scale, g * KT_STRIP + 16);
#pragma GCC unroll 5
    for (int t = 0; t < tokens; t++) {
      const __m512 xs = _mm512_set1_ps(x_scale[t * floats + g]);
      float *const to = out + t * KT_STRIP;
      const __m512 v0 = _mm512_cvtepi32_ps(acc[t][0]), v1 = _mm512_cvtepi32_ps(acc[t][1]);
      _mm512_storeu_ps(to, _mm512_fmadd_ps(v0, _mm512_mul_ps(scale0, xs), _mm512_loadu_ps(to)));
      _mm512_storeu_ps(to + 16,
                       _mm512_fmadd_ps(v1, _mm512_mul_ps(scale1, xs), _mm512_loadu_ps(to + 16)));
    }
  }
}

KT_INLINE void micro_any(const int ascending, int64_t tokens, const uint8_t *w, const columns *c,
                         const void *scale, const uint8_t *x, const float *x_scale,
                         const int32_t *x_sum, int64_t stride, float *out) {
  switch (tokens) {
#define KT_CASE(n)                                                                                 \
  case n: micro(ascending, n, w, c, scale, x, x_scale, x_sum, stride, out); break;
    KT_CASE(1)
    KT_CASE(2)
    KT_CASE(3)
    KT_CASE(4)
    KT_CASE(5)
#undef KT_CASE
  }
}

/* One strip's columns for all tokens; the first block of them reads w from memory. */
static void multiply_strip(const kt_weight *w, const uint8_t *codes, const columns *c,
                           const uint8_t *scale, const uint8_t *x, int64_t stride, int64_t tokens,
                           float *out) {
  const int64_t group = w->layout.group, k = c->first_group * group;
  const int64_t blocks = (tokens + BLOCK - 1) / BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t t = tokens * b / blocks, count = tokens * (b + 1) / blocks - t;
    const uint8_t *const row = x + t * stride;
    const float *const x_scale = kt_gint4_x_scale(row, w->cols) + c->first_group;
    const int32_t *const x_sum = kt_gint4_x_sum(row, w->cols, w->cols / group) + c->first_group;
    if (b == 0)
      micro_any(1, count, codes, c, scale, row + k, x_scale, x_sum, stride, out + t * KT_STRIP);
    else
      micro_any(0, count, codes, c, scale, row + k, x_scale, x_sum, stride, out + t * KT_STRIP);
  }
}

void kt_gint4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const int64_t group = w->layout.group, all_groups = w->cols / group;
  const int64_t scale_size = w->layout.scale_dtype == KT_SCALE_F32 ? 4 : 2;
  const int64_t k_block = tokens <= BLOCK ? w->cols : K_BLOCK;
  (void)panel;
  __builtin_memset(out, 0, (size_t)(strips * tokens * KT_STRIP) * sizeof *out);
  for (int64_t k = 0; k < w->cols; k += k_block) {
    const int64_t cols = w->cols - k < k_block ? w->cols - k : k_block;
    const columns c = {cols / group, group / KT_TILE_COLS, k / group, w->layout.scale_dtype};
    for (int64_t s = 0; s < strips; s++) {
      const int64_t at = (strip + s) * all_groups + c.first_group;
      multiply_strip(w, w->codes + (strip + s) * w->cols * KT_STRIP / 2 + k * KT_STRIP / 2, &c,
                     (const uint8_t *)w->scale + at * KT_STRIP * scale_size, x, stride, tokens,
                     out + s * tokens * KT_STRIP);
    }
  }
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
