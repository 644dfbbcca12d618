/* The reference for activation and weighted sum. */
#include <math.h>

#include "epilogue.h"
#include "rows.h"

static float horner(const float *terms, int count, float x) {
  float sum = terms[0];
  for (int i = 1; i < count; i++) sum = fmaf(sum, x, terms[i]);
  return sum;
}

/* Comparisons as written let a NaN pass through. */
static float at_most(float limit, float x) { return limit < x ? limit : x; }
static float at_least(float limit, float x) { return limit > x ? limit : x; }

static float exponential(float x) {
  x = at_most(KT_EXP_MAX, at_least(KT_EXP_MIN, x));
  const float shifted = fmaf(x, KT_LOG2_E, KT_ROUNDER), n = shifted - KT_ROUNDER;
  const float r = fmaf(-n, KT_LN2_LOW, fmaf(-n, KT_LN2_HIGH, x));
  const float power = kt_float((kt_bits(shifted) - 0x4b400000u + 127u) << 23);
  return horner(kt_exp_taylor, KT_EXP_TERMS, r) * power;
}

static float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static float error_function(float x) {
  const float size = fabsf(x), t = 1.0f / fmaf(KT_ERF_P, size, 1.0f);
  const float rest = horner(kt_erf_poly, KT_ERF_TERMS, t) * exponential(-(size * size));
  return copysignf(1.0f - rest, x);
}

static float gated(const kt_activation *a, float g, float u) {
  switch (a->function) {
  case KT_GELU: return (0.5f * g) * (1.0f + error_function(g * KT_SQRT_HALF)) * u;
  case KT_GELU_TANH: return g * sigmoid(KT_SQRT_8_OVER_PI * fmaf((0.044715f * g) * g, g, g)) * u;
  default: return g * sigmoid(a->alpha * g) * (u + a->beta);
  }
}

static void activate(const kt_activation *a, const float *gate, const float *up,
                     const float *gate_bias, const float *up_bias, float *out) {
  for (int r = 0; r < KT_STRIP; r++) {
    const float g = gate_bias ? gate[r] + gate_bias[r] : gate[r];
    const float u = up_bias ? up[r] + up_bias[r] : up[r];
    out[r] = gated(a, at_most(a->limit, g), at_most(a->limit, at_least(-a->limit, u)));
  }
}

static void accumulate(float weight, const float *product, const float *bias, float *y) {
  for (int r = 0; r < KT_STRIP; r++)
    y[r] = fmaf(weight, bias ? product[r] + bias[r] : product[r], y[r]);
}

static void widen(const uint16_t *x, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) out[i] = kt_float((uint32_t)x[i] << 16);
}

static void finish(const float *part, int64_t parts, int64_t stride, int64_t n, uint16_t *y) {
  for (int64_t i = 0; i < n; i += 16) {
    float sum[16];
    memcpy(sum, part + i, sizeof sum);
    for (int64_t p = 1; p < parts; p++)
      for (int j = 0; j < 16; j++) sum[j] += part[p * stride + i + j];
    kt_rows_bf16_scalar(sum, 16, y + i);
  }
}

const kt_epilogue kt_epilogue_scalar = {activate, accumulate, widen, finish};

const kt_epilogue *const kt_epilogues[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_epilogue_scalar,
#if KT_X86
    [KT_ISA_AVX512] = &kt_epilogue_avx512,
#endif
};
