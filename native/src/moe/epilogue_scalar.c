/* The reference for activation and weighted sum. */
#include <math.h>

#include "epilogue.h"

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
        in->out[t * in->stride + row] = kt_activated_of(function, a, g, u).h;
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
