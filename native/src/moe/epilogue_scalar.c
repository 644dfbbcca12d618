/* The reference for activation and weighted sum. */
#include <math.h>

#include "epilogue.h"
#include "rows.h"

/* Comparisons as written let a NaN pass through. */
static float at_most(float limit, float x) { return limit < x ? limit : x; }
static float at_least(float limit, float x) { return limit > x ? limit : x; }

static float exponential(float x) {
  const kt_reduced e = kt_reduce(at_most(KT_EXP_MAX, at_least(KT_EXP_MIN, x)));
  return kt_horner(kt_exp_taylor, KT_EXP_TERMS, e.r) * kt_power_of_two(e.n);
}

static float hyperbolic_tangent(float x) {
  const kt_reduced e = kt_reduce(at_most(KT_EXP_MAX, 2.0f * fabsf(x)));
  const float power = kt_power_of_two(e.n);
  const float p = kt_horner(kt_exp_taylor, KT_EXP_TERMS - 1, e.r) * e.r;
  const float less_one = fmaf(power, p, power - 1.0f);
  return copysignf(less_one / (less_one + 2.0f), x);
}

static float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static float error_function(float x) {
  const float size = fabsf(x), t = 1.0f / fmaf(KT_ERF_P, size, 1.0f);
  const float rest = kt_horner(kt_erf_poly, KT_ERF_TERMS, t) * exponential(-(size * size));
  return copysignf(1.0f - rest, x);
}

static float capped(float cap, float x) {
  return cap == INFINITY ? x : cap * hyperbolic_tangent(x / cap);
}

static float gelu(float x) { return (0.5f * x) * (1.0f + error_function(x * KT_SQRT_HALF)); }

static float gelu_tanh(float x) {
  return x * sigmoid(KT_SQRT_8_OVER_PI * fmaf((0.044715f * x) * x, x, x));
}

static float squared(float x) { return x * x; }

static float inner(int function, const kt_activation *a, float gate, float up) {
  const float g = at_most(a->limit, gate), u = at_most(a->limit, at_least(-a->limit, up));
  switch (function) {
  case KT_GELU: return gelu(g) * u;
  case KT_GELU_TANH: return gelu_tanh(g) * u;
  case KT_RELU2: return squared(at_least(0.0f, u));
  case KT_RELU: return at_least(0.0f, u);
  case KT_UNGATED_GELU: return gelu(u);
  case KT_UNGATED_GELU_TANH: return gelu_tanh(u);
  case KT_SWIGLU_CLAMPED: return at_most(a->limit, gate * sigmoid(gate)) * u;
  case KT_SOFTCAP: return capped(a->alpha, g) * sigmoid(g) * capped(a->beta, u);
  default: return g * sigmoid(a->alpha * g) * (u + a->beta);
  }
}

static float with_bias(float value, const float *bias, int64_t row) {
  return bias ? value + bias[row] : value;
}

static void activate(int function, const kt_activation *a, const kt_inner *in) {
  for (int64_t s = 0; s < in->strips; s++)
    for (int64_t t = 0; t < in->tokens; t++)
      for (int64_t r = 0; r < KT_STRIP; r++) {
        const int64_t row = s * KT_STRIP + r, at = (s * in->tokens + t) * KT_STRIP + r;
        const float g = kt_has_gate(function) ? with_bias(in->gate[at], in->gate_bias, row) : 0.0f;
        const float u = with_bias(in->up[at], in->up_bias, row);
        in->out[t * in->stride + row] = inner(function, a, g, u);
      }
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE)

static void accumulate(float weight, const float *product, const float *bias, float *y) {
  for (int r = 0; r < KT_STRIP; r++)
    y[r] = fmaf(weight, bias ? product[r] + bias[r] : product[r], y[r]);
}

static void sum(const float *part, int64_t parts, int64_t stride, const float *add, int64_t n,
                float *y) {
  for (int64_t i = 0; i < n; i++) {
    float total = add ? part[i] + add[i] : part[i];
    for (int64_t p = 1; p < parts; p++) total += part[p * stride + i];
    y[i] = total;
  }
}

const kt_epilogue kt_epilogue_scalar = {{KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_CELL)}, accumulate, sum};

const kt_epilogue *const kt_epilogues[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_epilogue_scalar,
#if KT_X86
    [KT_ISA_AVX512] = &kt_epilogue_avx512,
#endif
};
