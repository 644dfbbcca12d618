/* dense_loop.h - kt_dense_math in plain C, for compilers to make vectors of. */
#ifndef KT_DENSE_LOOP_H
#define KT_DENSE_LOOP_H

#include "../simd/exponential.h"
#include "../simd/unroll.h"
#include "dense.h"

#include <math.h>
#include <string.h>

enum { KT_DENSE_LANES = 16, KT_WEIGH_COLS = 32, KT_WEIGH_HEADS = 4 };

/* The sum of 16 partial ones. */
KT_INLINE float kt_tree_sum(float *sum) {
  for (int half = KT_DENSE_LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) sum[i] += sum[i + half];
  return sum[0];
}

KT_INLINE void kt_add_cols(const uint16_t *w, const uint16_t *x, float *even, float *odd) {
  uint32_t a[KT_DENSE_LANES], b[KT_DENSE_LANES];
  memcpy(a, w, sizeof a);
  memcpy(b, x, sizeof b);
  for (int i = 0; i < KT_DENSE_LANES; i++) {
    even[i] = fmaf(kt_float(a[i] << 16), kt_float(b[i] << 16), even[i]);
    odd[i] = fmaf(kt_float(a[i] & 0xffff0000u), kt_float(b[i] & 0xffff0000u), odd[i]);
  }
}

KT_INLINE float kt_dot(const uint16_t *w, const uint16_t *x, int64_t cols) {
  float even[KT_DENSE_LANES] = {0}, odd[KT_DENSE_LANES] = {0};
  int64_t k = 0;
  for (; k + KT_DENSE_COLS <= cols; k += KT_DENSE_COLS) kt_add_cols(w + k, x + k, even, odd);
  if (k < cols) {
    uint16_t a[KT_DENSE_COLS] = {0}, b[KT_DENSE_COLS] = {0};
    memcpy(a, w + k, (size_t)(cols - k) * sizeof *a);
    memcpy(b, x + k, (size_t)(cols - k) * sizeof *b);
    kt_add_cols(a, b, even, odd);
  }
  for (int i = 0; i < KT_DENSE_LANES; i++) even[i] += odd[i];
  return kt_tree_sum(even);
}

KT_INLINE void kt_dots_loop(const kt_bf16_rows *w, const kt_bf16_rows *x, float *out,
                            int64_t step) {
  for (int64_t n = 0; n < w->count; n++)
    for (int64_t t = 0; t < x->count; t++)
      out[t * step + n] = kt_dot(w->row + n * w->stride, x->row + t * x->stride, w->cols);
}

/* `heads` and `cols` are constants, so that the sums are registers. */
KT_INLINE void kt_weigh_block(const int heads, const int cols, const kt_bf16_rows *w,
                              int64_t column, const float *p, int64_t step, float *out) {
  float sum[KT_WEIGH_HEADS][KT_WEIGH_COLS] = {{0}};
  for (int64_t n = 0; n < w->count; n++) {
    const uint16_t *const row = w->row + n * w->stride + column;
    for (int h = 0; h < heads; h++) {
      const float weight = p[h * step + n];
      for (int c = 0; c < cols; c++) sum[h][c] = fmaf(weight, kt_bf16_float(row[c]), sum[h][c]);
    }
  }
  for (int h = 0; h < heads; h++)
    memcpy(out + h * w->cols + column, sum[h], (size_t)cols * sizeof *out);
}

KT_INLINE void kt_weigh_heads(const int heads, const kt_bf16_rows *w, const float *p, int64_t step,
                              float *out) {
  int64_t c = 0;
  for (; c + KT_WEIGH_COLS <= w->cols; c += KT_WEIGH_COLS)
    kt_weigh_block(heads, KT_WEIGH_COLS, w, c, p, step, out);
  for (; c < w->cols; c++) kt_weigh_block(heads, 1, w, c, p, step, out);
}

KT_INLINE void kt_weigh_loop(const kt_bf16_rows *w, const float *p, int64_t step, int64_t heads,
                             float *out) {
  int64_t h = 0;
  for (; h + KT_WEIGH_HEADS <= heads; h += KT_WEIGH_HEADS)
    kt_weigh_heads(KT_WEIGH_HEADS, w, p + h * step, step, out + h * w->cols);
  for (; h < heads; h++) kt_weigh_heads(1, w, p + h * step, step, out + h * w->cols);
}

KT_INLINE float kt_exponentials_loop(float *s, int64_t count, float scale, float max) {
  float sum[KT_DENSE_LANES] = {0};
  int64_t i = 0;
  for (; i + KT_DENSE_LANES <= count; i += KT_DENSE_LANES)
    for (int j = 0; j < KT_DENSE_LANES; j++) {
      s[i + j] = kt_exp(scale * (s[i + j] - max));
      sum[j] += s[i + j];
    }
  for (int j = 0; i < count; i++, j++) sum[j] += s[i] = kt_exp(scale * (s[i] - max));
  return kt_tree_sum(sum);
}

KT_INLINE void kt_scale_loop(const kt_norm *norm, const uint16_t *x, float factor, uint16_t *y) {
  const uint16_t *const weight = norm->weight;
  const float plus = norm->kind == KT_NORM_PLUS_ONE ? 1.0f : 0.0f;
  if (norm->kind == KT_NORM_ROUNDED)
    for (int64_t i = 0; i < norm->cols; i++) {
      const uint16_t rounded = kt_bf16_bits(kt_bf16_float(x[i]) * factor);
      y[i] = kt_bf16_bits(kt_bf16_float(weight[i]) * kt_bf16_float(rounded));
    }
  else
    for (int64_t i = 0; i < norm->cols; i++)
      y[i] = kt_bf16_bits((kt_bf16_float(weight[i]) + plus) * (kt_bf16_float(x[i]) * factor));
}

KT_INLINE uint16_t kt_rotated(uint16_t x, uint16_t cosine, float other, uint16_t sine) {
  const uint16_t a = kt_bf16_bits(kt_bf16_float(x) * kt_bf16_float(cosine));
  const uint16_t b = kt_bf16_bits(other * kt_bf16_float(sine));
  return kt_bf16_bits(kt_bf16_float(a) + kt_bf16_float(b));
}

KT_INLINE void kt_rotate_loop(int64_t cols, const uint16_t *x, const uint16_t *cosine,
                              const uint16_t *sine, uint16_t *y) {
  const int64_t half = cols / 2;
  for (int64_t i = 0; i < half; i++)
    y[i] = kt_rotated(x[i], cosine[i], -kt_bf16_float(x[i + half]), sine[i]);
  for (int64_t i = half; i < cols; i++)
    y[i] = kt_rotated(x[i], cosine[i], kt_bf16_float(x[i - half]), sine[i]);
}

/* Functions of these loops with `name` in theirs. */
#define KT_DENSE_LOOPS(name)                                                                       \
  static void weigh_##name(const kt_bf16_rows *w, const float *p, int64_t step, int64_t heads,     \
                           float *out) {                                                           \
    kt_weigh_loop(w, p, step, heads, out);                                                         \
  }                                                                                                \
  static float exponentials_##name(float *s, int64_t count, float scale, float max) {              \
    return kt_exponentials_loop(s, count, scale, max);                                             \
  }                                                                                                \
  static void scale_##name(const kt_norm *norm, const uint16_t *x, float factor, uint16_t *y) {    \
    kt_scale_loop(norm, x, factor, y);                                                             \
  }                                                                                                \
  static void rotate_##name(int64_t cols, const uint16_t *x, const uint16_t *cosine,               \
                            const uint16_t *sine, uint16_t *y) {                                   \
    kt_rotate_loop(cols, x, cosine, sine, y);                                                      \
  }

#endif
