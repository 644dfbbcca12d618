/* activation.h - h = function(gate, up) of one number, and the functions that it and its gradient
 * consist of.
 *
 * Every operation is spelled out (which are fused, in which order), so that each level gives
 * the same bits. exp(x): as ../simd/exponential.h has it, x in [-87, 88]. erf: Abramowitz and
 * Stegun 7.1.26, absolute error below 5e-7.
 *
 * tanh(|x|) = e / (e + 2) with e = exp(2 |x|) - 1 = fma(2^n, p, 2^n - 1), p = r times the same
 * polynomial without its last term. Nothing cancels in p, so small x have the same relative error:
 * below 2.4e-7 (2.375e-7 is the largest of all normal x up to 9.5, against tanh in binary64, at
 * 1.53e-5; 1 beyond). */
#ifndef KT_ACTIVATION_H
#define KT_ACTIVATION_H

#include "../simd/exponential.h"
#include "ktconv.h"

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

/* Comparisons as written let a NaN pass through. */
KT_INLINE float kt_at_most(float limit, float x) { return limit < x ? limit : x; }
KT_INLINE float kt_at_least(float limit, float x) { return limit > x ? limit : x; }

KT_INLINE float kt_exponential(float x) {
  const kt_reduced e = kt_reduce(kt_at_most(KT_EXP_MAX, kt_at_least(KT_EXP_MIN, x)));
  return kt_horner(kt_exp_taylor, KT_EXP_TERMS, e.r) * kt_power_of_two(e.n);
}

/* exp(2 |x|) - 1 */
KT_INLINE float kt_tanh_growth(float x) {
  const kt_reduced e = kt_reduce(kt_at_most(KT_EXP_MAX, 2.0f * fabsf(x)));
  const float power = kt_power_of_two(e.n);
  const float p = kt_horner(kt_exp_taylor, KT_EXP_TERMS - 1, e.r) * e.r;
  return fmaf(power, p, power - 1.0f);
}

KT_INLINE float kt_hyperbolic_tangent(float x) {
  const float growth = kt_tanh_growth(x);
  return copysignf(growth / (growth + 2.0f), x);
}

KT_INLINE float kt_sigmoid(float x) { return 1.0f / (1.0f + kt_exponential(-x)); }

KT_INLINE float kt_error_function(float x) {
  const float size = fabsf(x), t = 1.0f / fmaf(KT_ERF_P, size, 1.0f);
  const float rest = kt_horner(kt_erf_poly, KT_ERF_TERMS, t) * kt_exponential(-(size * size));
  return copysignf(1.0f - rest, x);
}

KT_INLINE float kt_capped(float cap, float x) {
  return cap == INFINITY ? x : cap * kt_hyperbolic_tangent(x / cap);
}

KT_INLINE float kt_gelu(float x) {
  return (0.5f * x) * (1.0f + kt_error_function(x * KT_SQRT_HALF));
}

KT_INLINE float kt_gelu_tanh(float x) {
  return x * kt_sigmoid(KT_SQRT_8_OVER_PI * fmaf((0.044715f * x) * x, x, x));
}

KT_INLINE float kt_squared(float x) { return x * x; }

KT_INLINE float kt_activated(int function, const kt_activation *a, float gate, float up) {
  const float g = kt_at_most(a->limit, gate), u = kt_at_most(a->limit, kt_at_least(-a->limit, up));
  switch (function) {
  case KT_GELU: return kt_gelu(g) * u;
  case KT_GELU_TANH: return kt_gelu_tanh(g) * u;
  case KT_RELU2: return kt_squared(kt_at_least(0.0f, u));
  case KT_RELU: return kt_at_least(0.0f, u);
  case KT_UNGATED_GELU: return kt_gelu(u);
  case KT_UNGATED_GELU_TANH: return kt_gelu_tanh(u);
  case KT_SWIGLU_CLAMPED: return kt_at_most(a->limit, gate * kt_sigmoid(gate)) * u;
  case KT_SOFTCAP: return kt_capped(a->alpha, g) * kt_sigmoid(g) * kt_capped(a->beta, u);
  default: return g * kt_sigmoid(a->alpha * g) * (u + a->beta);
  }
}

#endif
