/* dense.h - what a model computes outside its experts, for few tokens: what each level provides.
 *
 * Numbers are bf16, sums binary32. A dot product has 32 partial sums, one for each remainder of the
 * column by 32, each by one fma a column from 0 on. They are added in a tree: those of even columns
 * to those of the odd ones beside them, then of the 16 the upper half to the lower one, until one
 * is left. Missing columns of the last 32 count as zeros. So its bits are the same on every level,
 * and do not depend on other rows or tokens. */
#ifndef KT_DENSE_H
#define KT_DENSE_H

#include "../simd/bits.h"
#include "ktconv.h"

#include <stdint.h>

enum {
  KT_DENSE_COLS = 32,    /* that are multiplied together */
  KT_DENSE_ROWS = 32,    /* of a matrix that a thread takes at a time */
  KT_DENSE_TOKENS = 16,  /* multiplied with them at a time */
  KT_ATTEND_TOKENS = 256 /* keys of a unit of attention */
};

/* Rows of bf16, `stride` elements apart. */
typedef struct kt_bf16_rows {
  const uint16_t *row;
  int64_t count, cols, stride;
} kt_bf16_rows;

typedef struct kt_dense_math {
  /* out[t * step + n] = row n of w times row t of x, of as many columns. */
  void (*dots)(const kt_bf16_rows *w, const kt_bf16_rows *x, float *out, int64_t step);
  /* out[h * w->cols + c] = sum over n, in order, of p[h * step + n] * w[n][c], h < heads. */
  void (*weigh)(const kt_bf16_rows *w, const float *p, int64_t step, int64_t heads, float *out);
  /* s[i] = exp(scale * (s[i] - max)), i < count, and their sum: in 16 partial ones, by the
   * remainder of i, added as those of a dot product. */
  float (*exponentials)(float *s, int64_t count, float scale, float max);
  /* y = x * factor by the weights of a norm (kt_norm). */
  void (*scale)(const kt_norm *norm, const uint16_t *x, float factor, uint16_t *y);
  /* A head of kt_rotate. */
  void (*rotate)(int64_t cols, const uint16_t *x, const uint16_t *cosine, const uint16_t *sine,
                 uint16_t *y);
} kt_dense_math;

extern const kt_dense_math kt_dense_math_scalar, kt_dense_math_avx2, kt_dense_math_avx512;

/* The cell for the level in use. */
const kt_dense_math *kt_dense_math_best(void);

/* Whether sizes and arrays of a linear layer can be. */
int kt_linear_fits(const kt_linear *linear);

/* Linear layers of the same x, whose outputs go to y[0 .. count - 1]; all fit. */
kt_status kt_linears_run(const kt_linear *linear, int64_t count, kt_pool *pool, int64_t tokens,
                         const uint16_t *x, uint16_t *const *y);

static inline float kt_bf16_float(uint16_t bits) { return kt_float((uint32_t)bits << 16); }

static inline int kt_is_bf16_array(const void *array) {
  return array && (uintptr_t)array % sizeof(uint16_t) == 0;
}

#endif
