/* Activation and weighted sum with AVX-512; the same bits as epilogue_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

#include <math.h>

KT_TARGET_BEGIN(AVX512)
#include "../simd/exponential_avx512.h"
#include "epilogue.h"
#include "rows.h"

KT_INLINE __m512 flip_sign(__m512 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }

/* Of the two operands of max and min, the second where they are unordered. */
KT_INLINE __m512 at_least(float limit, __m512 x) { return _mm512_max_ps(_mm512_set1_ps(limit), x); }
KT_INLINE __m512 at_most(float limit, __m512 x) { return _mm512_min_ps(_mm512_set1_ps(limit), x); }

KT_INLINE __m512 exponential(__m512 x) {
  const kt_reduced16 e = kt_reduce16(at_most(KT_EXP_MAX, at_least(KT_EXP_MIN, x)));
  return _mm512_mul_ps(kt_horner16(kt_exp_taylor, KT_EXP_TERMS, e.r), kt_power_of_two16(e.n));
}

KT_INLINE __m512 with_sign_of(__m512 x, __m512 size) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(sign, size), _mm512_and_ps(x, sign));
}

KT_INLINE __m512 hyperbolic_tangent(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
  const kt_reduced16 e =
      kt_reduce16(at_most(KT_EXP_MAX, _mm512_mul_ps(_mm512_set1_ps(2.0f), size)));
  const __m512 power = kt_power_of_two16(e.n);
  const __m512 p = _mm512_mul_ps(kt_horner16(kt_exp_taylor, KT_EXP_TERMS - 1, e.r), e.r);
  const __m512 less_one = _mm512_fmadd_ps(power, p, _mm512_sub_ps(power, one));
  const __m512 more_one = _mm512_add_ps(less_one, _mm512_set1_ps(2.0f));
  return with_sign_of(x, _mm512_div_ps(less_one, more_one));
}

KT_INLINE __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exponential(flip_sign(x))));
}

KT_INLINE __m512 error_function(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(KT_ERF_P), size, one));
  const __m512 decay = exponential(flip_sign(_mm512_mul_ps(size, size)));
  const __m512 rest = _mm512_mul_ps(kt_horner16(kt_erf_poly, KT_ERF_TERMS, t), decay);
  return with_sign_of(x, _mm512_sub_ps(one, rest));
}

KT_INLINE __m512 gelu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 step =
      _mm512_add_ps(one, error_function(_mm512_mul_ps(x, _mm512_set1_ps(KT_SQRT_HALF))));
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), step);
}

KT_INLINE __m512 gelu_tanh(__m512 x) {
  const __m512 square = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.044715f), x), x);
  const __m512 z = _mm512_mul_ps(_mm512_set1_ps(KT_SQRT_8_OVER_PI), _mm512_fmadd_ps(square, x, x));
  return _mm512_mul_ps(x, sigmoid(z));
}

KT_INLINE __m512 capped(float cap, __m512 x) {
  if (cap == INFINITY) return x;
  const __m512 size = _mm512_set1_ps(cap);
  return _mm512_mul_ps(size, hyperbolic_tangent(_mm512_div_ps(x, size)));
}

KT_INLINE __m512 squared(__m512 x) { return _mm512_mul_ps(x, x); }

KT_INLINE __m512 inner(int function, const kt_activation *a, __m512 gate, __m512 up) {
  const __m512 g = at_most(a->limit, gate), u = at_most(a->limit, at_least(-a->limit, up));
  switch (function) {
  case KT_GELU: return _mm512_mul_ps(gelu(g), u);
  case KT_GELU_TANH: return _mm512_mul_ps(gelu_tanh(g), u);
  case KT_RELU2: return squared(at_least(0.0f, u));
  case KT_RELU: return at_least(0.0f, u);
  case KT_UNGATED_GELU: return gelu(u);
  case KT_UNGATED_GELU_TANH: return gelu_tanh(u);
  case KT_SWIGLU_CLAMPED:
    return _mm512_mul_ps(at_most(a->limit, _mm512_mul_ps(gate, sigmoid(gate))), u);
  case KT_SOFTCAP:
    return _mm512_mul_ps(_mm512_mul_ps(capped(a->alpha, g), sigmoid(g)), capped(a->beta, u));
  default:
    return _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(_mm512_mul_ps(_mm512_set1_ps(a->alpha), g))),
                         _mm512_add_ps(u, _mm512_set1_ps(a->beta)));
  }
}

KT_INLINE __m512 with_bias(const float *value, const float *bias, int64_t row) {
  const __m512 v = _mm512_loadu_ps(value);
  return bias ? _mm512_add_ps(v, _mm512_loadu_ps(bias + row)) : v;
}

/* Works on copies of its arguments, which stores to `out` could otherwise change for all that the
 * compiler knows. */
KT_INLINE void activate(int function, const kt_activation *activation, const kt_inner *given) {
  const kt_activation a = *activation;
  const kt_inner in = *given;
  for (int64_t s = 0; s < in.strips; s++)
    for (int64_t t = 0; t < in.tokens; t++)
      for (int64_t r = 0; r < KT_STRIP; r += 16) {
        const int64_t row = s * KT_STRIP + r, at = (s * in.tokens + t) * KT_STRIP + r;
        const __m512 u = with_bias(in.up + at, in.up_bias, row);
        const __m512 g = kt_has_gate(function) ? with_bias(in.gate + at, in.gate_bias, row) : u;
        _mm512_storeu_ps(in.out + t * in.stride + row, inner(function, &a, g, u));
      }
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE)

static void accumulate(float weight, const float *product, const float *bias, float *y) {
  const __m512 w = _mm512_set1_ps(weight);
  for (int r = 0; r < KT_STRIP; r += 16)
    _mm512_storeu_ps(y + r,
                     _mm512_fmadd_ps(w, with_bias(product + r, bias, r), _mm512_loadu_ps(y + r)));
}

static void sum(const float *part, int64_t parts, int64_t stride, const float *add, int64_t n,
                float *y) {
  for (int64_t i = 0; i < n; i += 16) {
    __m512 total = _mm512_loadu_ps(part + i);
    if (add) total = _mm512_add_ps(total, _mm512_loadu_ps(add + i));
    for (int64_t p = 1; p < parts; p++)
      total = _mm512_add_ps(total, _mm512_loadu_ps(part + p * stride + i));
    _mm512_storeu_ps(y + i, total);
  }
}

const kt_epilogue kt_epilogue_avx512 = {{KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_CELL)}, accumulate, sum};

KT_TARGET_END
#endif
