/* epilogue.h - what happens to the products of a strip: activation, weighted sum.
 *
 * Every operation is spelled out (which are fused, in which order), so that each level gives
 * the same bits. exp(x): as ../simd/exponential.h has it, x in [-87, 88]. erf: Abramowitz and
 * Stegun 7.1.26, absolute error below 5e-7.
 *
 * tanh(|x|) = e / (e + 2) with e = exp(2 |x|) - 1 = fma(2^n, p, 2^n - 1), p = r times the same
 * polynomial without its last term. Nothing cancels in p, so small x have the same relative error:
 * below 2.4e-7 (2.375e-7 is the largest of all normal x up to 9.5, against tanh in binary64, at
 * 1.53e-5; 1 beyond). */
#ifndef KT_EPILOGUE_H
#define KT_EPILOGUE_H

#include "../simd/exponential.h"
#include "gemm.h"

#define KT_EXP_MIN -87.0f
#define KT_EXP_MAX 88.0f
#define KT_SQRT_HALF 0.70710678f
#define KT_SQRT_8_OVER_PI 1.59576912f
#define KT_ERF_P 0.3275911f

/* Coefficients from the highest power down. */
static const float kt_erf_poly[] = {1.061405429f,  -1.453152027f, 1.421413741f,
                                    -0.284496736f, 0.254829592f,  0.0f};
enum { KT_ERF_TERMS = 6 };

#define KT_FOR_GATED_FUNCTIONS(DO)                                                                 \
  DO(KT_SWIGLU) DO(KT_GELU) DO(KT_GELU_TANH) DO(KT_SWIGLU_CLAMPED) DO(KT_SOFTCAP)
#define KT_FOR_UNGATED_FUNCTIONS(DO)                                                               \
  DO(KT_RELU2) DO(KT_RELU) DO(KT_UNGATED_GELU) DO(KT_UNGATED_GELU_TANH)
#define KT_FOR_GATE_FUNCTIONS(DO) KT_FOR_GATED_FUNCTIONS(DO) KT_FOR_UNGATED_FUNCTIONS(DO)
enum { KT_GATE_FUNCTIONS = KT_UNGATED_GELU_TANH + 1 };

#define KT_OR_IS(other) || function == (other)
static inline int kt_has_gate(int function) { return !(0 KT_FOR_UNGATED_FUNCTIONS(KT_OR_IS)); }

/* Products of the gate and up matrices of one expert, and where their activation goes. */
typedef struct kt_inner {
  const float *gate, *up;           /* [strips][tokens][32]; gate: if there is one */
  const float *gate_bias, *up_bias; /* [strips][32], or NULL */
  int64_t strips, tokens;
  float *out; /* [tokens][strips][32], a token `stride` floats after the other */
  int64_t stride;
} kt_inner;

/* out = function(gate + gate_bias, up + up_bias). */
typedef void kt_activate_fn(const kt_activation *activation, const kt_inner *inner);

typedef struct kt_epilogue {
  kt_activate_fn *activate[KT_GATE_FUNCTIONS]; /* chosen once for a layer */
  /* y[r] = fma(weight, product[r] + bias[r], y[r]), r < 32; bias may be NULL. */
  void (*accumulate)(float weight, const float *product, const float *bias, float *y);
  /* y = (part 0 + add) + part 1 + ..., in that order; parts lie `stride` floats apart; add may be
   * NULL, or y; n % 16 == 0. */
  void (*sum)(const float *part, int64_t parts, int64_t stride, const float *add, int64_t n,
              float *y);
} kt_epilogue;

/* A level writes one activate(function, activation, inner); these make a function, and its cell, of
 * each constant. */
#define KT_DEFINE_ACTIVATE(function)                                                               \
  static void activate_##function(const kt_activation *activation, const kt_inner *in) {           \
    activate(function, activation, in);                                                            \
  }
#define KT_ACTIVATE_CELL(function) [function] = activate_##function,

extern const kt_epilogue kt_epilogue_scalar, kt_epilogue_avx512;
extern const kt_epilogue *const kt_epilogues[KT_LEVELS];

#endif
