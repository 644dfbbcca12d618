/* slopes.h - the derivatives of h = function(gate, up), from what moe/activation.h has.
 *
 * With s = sigmoid(z) and e = exp(-z), 1 - s = e s and 1 - tanh(x)^2 = q (2 - q), q = 2 / (exp(2
 * |x|) + 1): nothing cancels. Where an argument is multiplied by what decays with it, it is kept in
 * [-88, 88], beyond which the product counts as 0: a large one neither overflows nor meets
 * the smallest exp(x) there is, 2^-126. */
#ifndef KT_SLOPES_H
#define KT_SLOPES_H

#include "../moe/activation.h"

#define KT_SQRT_1_OVER_2_PI 0.39894228f
#define KT_GELU_CUBIC 0.134145f /* 3 * 0.044715 */

KT_INLINE float kt_decaying(float x) { return kt_at_most(KT_EXP_MAX, kt_at_least(-KT_EXP_MAX, x)); }

/* s' = s (1 - s) */
KT_INLINE float kt_sigmoid_slope(float x) {
  const float s = kt_sigmoid(x);
  return s * (kt_exponential(-x) * s);
}

/* (x s)' = s + x s' */
KT_INLINE float kt_swish_slope(float x) {
  return fmaf(kt_decaying(x), kt_sigmoid_slope(x), kt_sigmoid(x));
}

/* (x P)' = P + x exp(-x^2 / 2) / sqrt(2 pi), P = (1 + erf(x / sqrt(2))) / 2 */
KT_INLINE float kt_gelu_slope(float x) {
  const float root = x * KT_SQRT_HALF, size = fabsf(root);
  const float density = KT_SQRT_1_OVER_2_PI * kt_exponential(-(size * size));
  return fmaf(kt_decaying(x), density, 0.5f * (1.0f + kt_error_function(root)));
}

/* (x s(z))' = s + x s' z', z = sqrt(8 / pi) (x + 0.044715 x^3) */
KT_INLINE float kt_gelu_tanh_slope(float x) {
  const float z = KT_SQRT_8_OVER_PI * fmaf((0.044715f * x) * x, x, x), near = kt_decaying(x);
  const float rise = KT_SQRT_8_OVER_PI * fmaf(KT_GELU_CUBIC * near, near, 1.0f);
  return fmaf(near * rise, kt_sigmoid_slope(z), kt_sigmoid(z));
}

/* (c tanh(x / c))' = 1 - tanh(x / c)^2 */
KT_INLINE float kt_capped_slope(float cap, float x) {
  if (cap == INFINITY) return 1.0f;
  const float q = 2.0f / (kt_tanh_growth(x / cap) + 2.0f);
  return q * (2.0f - q);
}

/* dh/dgate and dh/dup. */
typedef struct kt_slopes {
  float gate, up;
} kt_slopes;

/* Of g and u: gate and up within the limit. */
KT_INLINE kt_slopes kt_slopes_within(int function, const kt_activation *a, float g, float u) {
  switch (function) {
  case KT_GELU: return (kt_slopes){kt_gelu_slope(g) * u, kt_gelu(g)};
  case KT_GELU_TANH: return (kt_slopes){kt_gelu_tanh_slope(g) * u, kt_gelu_tanh(g)};
  case KT_RELU2: return (kt_slopes){0.0f, 2.0f * kt_at_least(0.0f, u)};
  case KT_RELU: return (kt_slopes){0.0f, u <= 0.0f ? 0.0f : 1.0f};
  case KT_UNGATED_GELU: return (kt_slopes){0.0f, kt_gelu_slope(u)};
  case KT_UNGATED_GELU_TANH: return (kt_slopes){0.0f, kt_gelu_tanh_slope(u)};
  case KT_SOFTCAP: {
    const float s = kt_sigmoid(g), gate = kt_capped(a->alpha, g), up = kt_capped(a->beta, u);
    const float rise = kt_decaying(gate) * kt_sigmoid_slope(g);
    return (kt_slopes){fmaf(kt_capped_slope(a->alpha, g), s, rise) * up,
                       (gate * s) * kt_capped_slope(a->beta, u)};
  }
  default: {
    const float z = a->alpha * g;
    return (kt_slopes){kt_swish_slope(z) * (u + a->beta), g * kt_sigmoid(z)};
  }
  }
}

/* KT_SWIGLU_CLAMPED cuts gate * sigmoid(gate), not the gate. */
KT_INLINE kt_slopes kt_slopes_clamped(const kt_activation *a, float gate, float u) {
  const float swish = gate * kt_sigmoid(gate);
  return (kt_slopes){a->limit < swish ? 0.0f : kt_swish_slope(gate) * u,
                     kt_at_most(a->limit, swish)};
}

KT_INLINE kt_slopes kt_slopes_of(int function, const kt_activation *a, float gate, float up) {
  const float g = kt_at_most(a->limit, gate), u = kt_at_most(a->limit, kt_at_least(-a->limit, up));
  kt_slopes s = function == KT_SWIGLU_CLAMPED ? kt_slopes_clamped(a, gate, u)
                                              : kt_slopes_within(function, a, g, u);
  if (function != KT_SWIGLU_CLAMPED && a->limit < gate) s.gate = 0.0f;
  if (a->limit < fabsf(up)) s.up = 0.0f;
  return s;
}

#endif
