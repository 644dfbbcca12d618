/* What is computed outside experts with AVX-512: dot products of four rows at a time, so that the
 * columns of x are loaded once for them, and memory has four streams. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "dense_loop.h"

enum { MOST_ROWS = 4, MOST_TOKENS = 4, AHEAD = 1024 /* bytes by which rows are prefetched */ };

KT_DENSE_LOOPS(avx512)

typedef struct pair {
  __m512 even, odd;
} pair;

KT_INLINE pair halves(__m512i numbers) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
  return (pair){_mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(numbers, upper))};
}

/* As kt_tree_sum. */
KT_INLINE float tree_sum(__m512 sum) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* 32 columns, or those of `mask`. */
KT_INLINE void add_cols(const int rows, const int tokens, const kt_bf16_rows *w,
                        const kt_bf16_rows *x, int64_t k, __mmask32 mask,
                        pair sum[MOST_ROWS][MOST_TOKENS]) {
  pair number[MOST_TOKENS];
  KT_UNROLL(4)
  for (int t = 0; t < tokens; t++)
    number[t] = halves(_mm512_maskz_loadu_epi16(mask, x->row + t * x->stride + k));
  KT_UNROLL(4)
  for (int r = 0; r < rows; r++) {
    _mm_prefetch((const char *)(w->row + r * w->stride + k) + AHEAD, _MM_HINT_T0);
    const pair weight = halves(_mm512_maskz_loadu_epi16(mask, w->row + r * w->stride + k));
    KT_UNROLL(4)
    for (int t = 0; t < tokens; t++) {
      sum[r][t].even = _mm512_fmadd_ps(weight.even, number[t].even, sum[r][t].even);
      sum[r][t].odd = _mm512_fmadd_ps(weight.odd, number[t].odd, sum[r][t].odd);
    }
  }
}

/* `rows` and `tokens` are constants. */
KT_INLINE void dot_block(const int rows, const int tokens, const kt_bf16_rows *w,
                         const kt_bf16_rows *x, float *out, int64_t step, int64_t apart) {
  pair sum[MOST_ROWS][MOST_TOKENS];
  KT_UNROLL(4)
  for (int r = 0; r < rows; r++) {
    KT_UNROLL(4)
    for (int t = 0; t < tokens; t++) sum[r][t].even = sum[r][t].odd = _mm512_setzero_ps();
  }
  int64_t k = 0;
  for (; k + KT_DENSE_COLS <= w->cols; k += KT_DENSE_COLS)
    add_cols(rows, tokens, w, x, k, 0xffffffffu, sum);
  if (k < w->cols) add_cols(rows, tokens, w, x, k, (1u << (w->cols - k)) - 1, sum);
  KT_UNROLL(4)
  for (int r = 0; r < rows; r++) {
    KT_UNROLL(4)
    for (int t = 0; t < tokens; t++)
      out[t * step + r * apart] = tree_sum(_mm512_add_ps(sum[r][t].even, sum[r][t].odd));
  }
}

/* `rows` at a time, which lie apart, so that memory has as many long streams; then what is left. */
KT_INLINE void dot_rows(const int rows, const int tokens, const kt_bf16_rows *w,
                        const kt_bf16_rows *x, float *out, int64_t step) {
  const int64_t apart = w->count / rows;
  kt_bf16_rows at = *w;
  at.stride = apart * w->stride;
  for (int64_t n = 0; n < apart; n++, at.row += w->stride)
    dot_block(rows, tokens, &at, x, out + n, step, apart);
  at.row = w->row + rows * apart * w->stride;
  for (int64_t n = rows * apart; n < w->count; n++, at.row += w->stride)
    dot_block(1, tokens, &at, x, out + n, step, 1);
}

static void dots(const kt_bf16_rows *w, const kt_bf16_rows *x, float *out, int64_t step) {
  kt_bf16_rows at = *x;
  int64_t t = 0;
  for (; t + 4 <= x->count; t += 4, at.row += 4 * x->stride)
    dot_rows(2, 4, w, &at, out + t * step, step);
  if (x->count - t == 3) dot_rows(2, 3, w, &at, out + t * step, step);
  if (x->count - t == 2) dot_rows(4, 2, w, &at, out + t * step, step);
  if (x->count - t == 1) dot_rows(4, 1, w, &at, out + t * step, step);
}

const kt_dense_math kt_dense_math_avx512 = {dots, weigh_avx512, exponentials_avx512, scale_avx512,
                                            rotate_avx512};

KT_TARGET_END
#endif
