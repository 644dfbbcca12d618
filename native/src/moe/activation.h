/* activation.h - h = function(gate, up) of one number and its derivatives: h is a factor of the
 * gate times one of up.
 *
 * Every operation is spelled out (which are fused, in which order), so that each level gives
 * the same bits. exp(x), x in [-87, 88]: n and r as in ../simd/exponential.h, but r in one step,
 * and a polynomial of degree 5, best for |r| <= 0.3466 with exp(0) = 1; relative error below 4e-7,
 * for |x| < 20 below 2.1e-7. 2^n is added to the exponent: neither factor nor product is denormal.
 * erf: Abramowitz and Stegun 7.1.26, absolute error below 5e-7.
 *
 * tanh(|x|) = e / (e + 2) with e = exp(2 |x|) - 1 = fma(2^n, p, 2^n - 1), p = r times the
 * polynomial of ../simd/exponential.h without its last term. Nothing cancels in p, so small x have
 * the same relative error: below 2.4e-7 (2.375e-7 is the largest of all normal x up to 9.5, against
 * tanh in binary64, at 1.53e-5; 1 beyond).
 */
#ifndef KT_ACTIVATION_H
#define KT_ACTIVATION_H

#include "../simd/exponential.h"
#include "ktconv.h"

#define KT_EXP_MIN -87.0f
#define KT_EXP_MAX 88.0f
#define KT_SQRT_HALF 0.70710678f
#define KT_SQRT_8_OVER_PI 1.59576912f
#define KT_SQRT_1_OVER_2_PI 0.39894228f
#define KT_GELU_CUBIC 0.044715f
#define KT_ERF_P 0.3275911f

#define KT_LN2 0.693147182f

/* Coefficients from the highest power down. */
static const float kt_exp_best[] = {8.290308527648449e-03f, 4.1897963732481e-02f,
                                    1.666763722896576e-01f, 4.999915063381195e-01f,
                                    9.999997019767761e-01f, 1.0f};
enum { KT_EXP_BEST_TERMS = 6 };
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
  const float within = kt_at_most(KT_EXP_MAX, kt_at_least(KT_EXP_MIN, x));
  const float shifted = fmaf(within, KT_LOG2_E, KT_ROUNDER), n = shifted - KT_ROUNDER;
  const float p = kt_horner(kt_exp_best, KT_EXP_BEST_TERMS, fmaf(-n, KT_LN2, within));
  return kt_float(kt_bits(p) + (kt_bits(shifted) << 23)); /* the rounder's bits leave on the left */
}

KT_INLINE float kt_hyperbolic_tangent(float x) {
  const kt_reduced e = kt_reduce(kt_at_most(KT_EXP_MAX, 2.0f * fabsf(x)));
  const float power = kt_power_of_two(e.n);
  const float p = kt_horner(kt_exp_taylor, KT_EXP_TERMS - 1, e.r) * e.r;
  const float less_one = fmaf(power, p, power - 1.0f);
  return copysignf(less_one / (less_one + 2.0f), x);
}

/* A function's value and derivative. All is inlined: who uses one of them computes no other. */
typedef struct kt_graded {
  float value, slope;
} kt_graded;

/* What is multiplied by something that decays with x, which beyond these limits counts as 0: a
 * large x would overflow, or meet the smallest exp(x) there is, 2^-126. */
KT_INLINE float kt_decaying(float x) { return kt_at_most(KT_EXP_MAX, kt_at_least(-KT_EXP_MAX, x)); }

/* f(min(x, limit)), given f(x) or f of the minimum. */
KT_INLINE kt_graded kt_flat_beyond(float limit, float x, kt_graded f) {
  return (kt_graded){f.value, limit < x ? 0.0f : f.slope};
}

/* With e = exp(-x): s = 1 / (1 + e), s' = s (1 - s) = s (e s), in which nothing cancels. */
KT_INLINE kt_graded kt_sigmoid(float x) {
  const float e = kt_exponential(-x), s = 1.0f / (1.0f + e);
  return (kt_graded){s, s * (e * s)};
}

/* x s(alpha x) */
KT_INLINE kt_graded kt_swish(float alpha, float x) {
  const float z = alpha * x;
  const kt_graded s = kt_sigmoid(z);
  return (kt_graded){x * s.value, fmaf(kt_decaying(z), s.slope, s.value)};
}

/* decay: exp(-x^2) */
KT_INLINE float kt_error_function(float x, float decay) {
  const float t = 1.0f / fmaf(KT_ERF_P, fabsf(x), 1.0f);
  return copysignf(1.0f - kt_horner(kt_erf_poly, KT_ERF_TERMS, t) * decay, x);
}

/* x P, P = (1 + erf(x / sqrt(2))) / 2, P' = exp(-x^2 / 2) / sqrt(2 pi) */
KT_INLINE kt_graded kt_gelu(float x) {
  const float root = x * KT_SQRT_HALF, decay = kt_exponential(-(root * root));
  const float step = 1.0f + kt_error_function(root, decay);
  const float rise = kt_decaying(x) * KT_SQRT_1_OVER_2_PI;
  return (kt_graded){(0.5f * x) * step, fmaf(rise, decay, 0.5f * step)};
}

/* x s(z), z = sqrt(8 / pi) (x + 0.044715 x^3) */
KT_INLINE kt_graded kt_gelu_tanh(float x) {
  const float near = kt_decaying(x), square = (KT_GELU_CUBIC * x) * x;
  const kt_graded s = kt_sigmoid(KT_SQRT_8_OVER_PI * fmaf(square, x, x));
  const float rise = KT_SQRT_8_OVER_PI * fmaf(3.0f * KT_GELU_CUBIC * near, near, 1.0f);
  return (kt_graded){x * s.value, fmaf(near * rise, s.slope, s.value)};
}

/* cap tanh(x / cap) */
KT_INLINE kt_graded kt_capped(float cap, float x) {
  if (cap == INFINITY) return (kt_graded){x, 1.0f};
  const float t = kt_hyperbolic_tangent(x / cap);
  return (kt_graded){cap * t, fmaf(-t, t, 1.0f)};
}

/* alpha tanh(g / alpha) s(g) */
KT_INLINE kt_graded kt_soft(float alpha, float g) {
  const kt_graded c = kt_capped(alpha, g), s = kt_sigmoid(g);
  return (kt_graded){c.value * s.value, fmaf(c.slope, s.value, kt_decaying(c.value) * s.slope)};
}

/* The factor of h that comes from the gate; 1 where there is none. KT_SWIGLU_CLAMPED cuts it, other
 * functions the gate itself. */
KT_INLINE kt_graded kt_gate_factor(int function, const kt_activation *a, float gate) {
  const float g = kt_at_most(a->limit, gate);
  switch (function) {
  case KT_SWIGLU: return kt_flat_beyond(a->limit, gate, kt_swish(a->alpha, g));
  case KT_GELU: return kt_flat_beyond(a->limit, gate, kt_gelu(g));
  case KT_GELU_TANH: return kt_flat_beyond(a->limit, gate, kt_gelu_tanh(g));
  case KT_SOFTCAP: return kt_flat_beyond(a->limit, gate, kt_soft(a->alpha, g));
  case KT_SWIGLU_CLAMPED: {
    const kt_graded f = kt_swish(1.0f, gate);
    return kt_flat_beyond(a->limit, f.value, (kt_graded){kt_at_most(a->limit, f.value), f.slope});
  }
  default: return (kt_graded){1.0f, 0.0f};
  }
}

KT_INLINE kt_graded kt_up_within(int function, const kt_activation *a, float u) {
  const float positive = kt_at_least(0.0f, u);
  switch (function) {
  case KT_SWIGLU: return (kt_graded){a->beta == 0.0f ? u : u + a->beta, 1.0f};
  case KT_SOFTCAP: return kt_capped(a->beta, u);
  case KT_RELU2: return (kt_graded){positive * positive, 2.0f * positive};
  case KT_RELU: return (kt_graded){positive, u <= 0.0f ? 0.0f : 1.0f};
  case KT_UNGATED_GELU: return kt_gelu(u);
  case KT_UNGATED_GELU_TANH: return kt_gelu_tanh(u);
  default: return (kt_graded){u, 1.0f};
  }
}

/* h and its derivatives. */
typedef struct kt_activated {
  float h, gate_slope, up_slope;
} kt_activated;

KT_INLINE kt_activated kt_activated_of(int function, const kt_activation *a, float gate, float up) {
  const float u = kt_at_most(a->limit, kt_at_least(-a->limit, up));
  const kt_graded g = kt_gate_factor(function, a, gate);
  const kt_graded f = kt_flat_beyond(a->limit, fabsf(up), kt_up_within(function, a, u));
  return (kt_activated){g.value * f.value, g.slope * f.value, g.value * f.slope};
}

#endif
