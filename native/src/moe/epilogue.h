/* epilogue.h - what happens to the products of a strip: activation, weighted sum.
 *
 * Every operation is spelled out (which are fused, in which order), so that each level gives
 * the same bits. */
#ifndef KT_EPILOGUE_H
#define KT_EPILOGUE_H

#include "activation.h"
#include "gemm.h"

/* Products of the gate and up matrices of one expert, and where their activation goes. */
typedef struct kt_inner {
  kt_sums gate, up;                 /* of the same tokens; gate: if there is one */
  const float *gate_bias, *up_bias; /* [strips][32], or NULL */
  int64_t strips;
  float *out; /* [tokens][strips][32], a token `stride` floats after the other */
  int64_t stride;
} kt_inner;

/* out = function(gate + gate_bias, up + up_bias) of tokens first .. end. */
typedef void kt_activate_fn(const kt_activation *activation, const kt_inner *inner, int64_t first,
                            int64_t end);

/* Products of the down matrix of one expert, and what they are added to. */
typedef struct kt_weighted {
  kt_sums down;
  const float *bias; /* [strips][32], or NULL */
  int64_t strips;
  const float *weight;  /* [tokens] */
  const int32_t *token; /* [tokens] whose row of y */
  const uint8_t *fresh; /* [tokens] whether that row counts as zeros, whatever it has */
  float *y;             /* first column of the strips, rows `stride` floats apart */
  int64_t stride;
} kt_weighted;

typedef struct kt_epilogue {
  kt_activate_fn *activate[KT_GATE_FUNCTIONS]; /* chosen once for a layer */
  /* y[token][r] = fma(weight, product[r] + bias[r], y[token][r]) of tokens first .. end. */
  void (*add_weighted)(const kt_weighted *weighted, int64_t first, int64_t end);
  /* The numbers of tokens first .. end of one strip: out[t][32], which may be the sums. */
  void (*numbers)(const kt_sums *sums, int64_t first, int64_t end, float *out);
  /* y = (part 0 + add) + part 1 + ..., in that order, of n numbers of each part from `at` on; add
   * may be NULL, or y; n % 16 == 0. */
  void (*sum)(const float *const *part, int64_t parts, int64_t at, const float *add, int64_t n,
              float *y);
} kt_epilogue;

/* A level writes one activate(function, activation, inner, first, end); these make a function, and
 * its cell, of each constant. */
#define KT_DEFINE_ACTIVATE(function)                                                               \
  static void activate_##function(const kt_activation *activation, const kt_inner *in,             \
                                  int64_t first, int64_t end) {                                    \
    activate(function, activation, in, first, end);                                                \
  }
#define KT_ACTIVATE_CELL(function) [function] = activate_##function,

extern const kt_epilogue kt_epilogue_scalar, kt_epilogue_avx512;
extern const kt_epilogue *const kt_epilogues[KT_LEVELS];

#endif
