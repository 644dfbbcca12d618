/* The reference for activation and weighted sum. */
#include <math.h>
#include <string.h>

#include "epilogue.h"

static float own_number(const kt_sums *s, int64_t strip, int64_t t, int64_t r) {
  const int64_t at = (strip * s->tokens + t) * KT_STRIP + r, row = strip * KT_STRIP + r;
  if (!s->whole) return ((const float *)s->sum)[at] * (s->row_scale ? s->row_scale[row] : 1.0f);
  float x_scale;
  memcpy(&x_scale, s->x_scale + t * s->stride, sizeof x_scale);
  const float sum = (float)(((const int32_t *)s->sum)[at] >> s->shift);
  return sum * (s->step * s->row_scale[row]) * x_scale;
}

static float number(const kt_sums *s, int64_t strip, int64_t t, int64_t r) {
  const float value = own_number(s, strip, t, r);
  return s->plus ? value + s->plus[(strip * s->tokens + t) * KT_STRIP + r] : value;
}

static float with_bias(const kt_sums *s, int64_t strip, int64_t t, int64_t r, const float *bias) {
  const float value = number(s, strip, t, r);
  return bias ? value + bias[strip * KT_STRIP + r] : value;
}

static void activate(int function, const kt_activation *a, const kt_inner *in, int64_t first,
                     int64_t end) {
  const int gated = kt_has_gate(function);
  for (int64_t s = 0; s < in->strips; s++)
    for (int64_t t = first; t < end; t++)
      for (int64_t r = 0; r < KT_STRIP; r++) {
        const float g = gated ? with_bias(&in->gate, s, t, r, in->gate_bias) : 0.0f;
        const float u = with_bias(&in->up, s, t, r, in->up_bias);
        in->out[t * in->stride + s * KT_STRIP + r] = kt_activated_of(function, a, g, u).h;
      }
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE)

static void add_weighted(const kt_weighted *o, int64_t first, int64_t end) {
  for (int64_t s = 0; s < o->strips; s++)
    for (int64_t t = first; t < end; t++) {
      float *const y = o->y + o->token[t] * o->stride + s * KT_STRIP;
      for (int64_t r = 0; r < KT_STRIP; r++)
        y[r] = fmaf(o->weight[t], with_bias(&o->down, s, t, r, o->bias), o->fresh[t] ? 0.0f : y[r]);
    }
}

static void numbers(const kt_sums *sums, int64_t first, int64_t end, float *out) {
  for (int64_t t = first; t < end; t++)
    for (int64_t r = 0; r < KT_STRIP; r++) out[t * KT_STRIP + r] = number(sums, 0, t, r);
}

static void sum(const float *const *part, int64_t parts, int64_t at, const float *add, int64_t n,
                float *y) {
  for (int64_t i = 0; i < n; i++) {
    float total = add ? part[0][at + i] + add[i] : part[0][at + i];
    for (int64_t p = 1; p < parts; p++) total += part[p][at + i];
    y[i] = total;
  }
}

const kt_epilogue kt_epilogue_scalar = {
    {KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_CELL)}, add_weighted, numbers, sum};

const kt_epilogue *const kt_epilogues[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_epilogue_scalar,
#if KT_X86
    [KT_ISA_AVX512] = &kt_epilogue_avx512,
#endif
};
