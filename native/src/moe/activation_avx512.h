/* activation_avx512.h - activation.h, 16 numbers at a time; the same bits. */
#ifndef KT_ACTIVATION_AVX512_H
#define KT_ACTIVATION_AVX512_H

#include "../simd/exponential_avx512.h"
#include "activation.h"

KT_INLINE __m512 kt_flip_sign16(__m512 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }

/* Of the two operands of max and min, the second where they are unordered. */
KT_INLINE __m512 kt_at_least16(float limit, __m512 x) {
  return _mm512_max_ps(_mm512_set1_ps(limit), x);
}
KT_INLINE __m512 kt_at_most16(float limit, __m512 x) {
  return _mm512_min_ps(_mm512_set1_ps(limit), x);
}

KT_INLINE __m512 kt_exponential16(__m512 x) {
  const kt_reduced16 e = kt_reduce16(kt_at_most16(KT_EXP_MAX, kt_at_least16(KT_EXP_MIN, x)));
  return _mm512_mul_ps(kt_horner16(kt_exp_taylor, KT_EXP_TERMS, e.r), kt_power_of_two16(e.n));
}

KT_INLINE __m512 kt_with_sign_of16(__m512 x, __m512 size) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(sign, size), _mm512_and_ps(x, sign));
}

KT_INLINE __m512 kt_tanh_growth16(__m512 x) {
  const __m512 twice = _mm512_mul_ps(_mm512_set1_ps(2.0f), _mm512_abs_ps(x));
  const kt_reduced16 e = kt_reduce16(kt_at_most16(KT_EXP_MAX, twice));
  const __m512 power = kt_power_of_two16(e.n);
  const __m512 p = _mm512_mul_ps(kt_horner16(kt_exp_taylor, KT_EXP_TERMS - 1, e.r), e.r);
  return _mm512_fmadd_ps(power, p, _mm512_sub_ps(power, _mm512_set1_ps(1.0f)));
}

KT_INLINE __m512 kt_hyperbolic_tangent16(__m512 x) {
  const __m512 growth = kt_tanh_growth16(x);
  return kt_with_sign_of16(x, _mm512_div_ps(growth, _mm512_add_ps(growth, _mm512_set1_ps(2.0f))));
}

KT_INLINE __m512 kt_sigmoid16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, kt_exponential16(kt_flip_sign16(x))));
}

KT_INLINE __m512 kt_error_function16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(KT_ERF_P), size, one));
  const __m512 decay = kt_exponential16(kt_flip_sign16(_mm512_mul_ps(size, size)));
  const __m512 rest = _mm512_mul_ps(kt_horner16(kt_erf_poly, KT_ERF_TERMS, t), decay);
  return kt_with_sign_of16(x, _mm512_sub_ps(one, rest));
}

KT_INLINE __m512 kt_gelu16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 step =
      _mm512_add_ps(one, kt_error_function16(_mm512_mul_ps(x, _mm512_set1_ps(KT_SQRT_HALF))));
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), step);
}

KT_INLINE __m512 kt_gelu_tanh16(__m512 x) {
  const __m512 square = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.044715f), x), x);
  const __m512 z = _mm512_mul_ps(_mm512_set1_ps(KT_SQRT_8_OVER_PI), _mm512_fmadd_ps(square, x, x));
  return _mm512_mul_ps(x, kt_sigmoid16(z));
}

KT_INLINE __m512 kt_capped16(float cap, __m512 x) {
  if (cap == INFINITY) return x;
  const __m512 size = _mm512_set1_ps(cap);
  return _mm512_mul_ps(size, kt_hyperbolic_tangent16(_mm512_div_ps(x, size)));
}

KT_INLINE __m512 kt_squared16(__m512 x) { return _mm512_mul_ps(x, x); }

KT_INLINE __m512 kt_activated16(int function, const kt_activation *a, __m512 gate, __m512 up) {
  const __m512 g = kt_at_most16(a->limit, gate),
               u = kt_at_most16(a->limit, kt_at_least16(-a->limit, up));
  switch (function) {
  case KT_GELU: return _mm512_mul_ps(kt_gelu16(g), u);
  case KT_GELU_TANH: return _mm512_mul_ps(kt_gelu_tanh16(g), u);
  case KT_RELU2: return kt_squared16(kt_at_least16(0.0f, u));
  case KT_RELU: return kt_at_least16(0.0f, u);
  case KT_UNGATED_GELU: return kt_gelu16(u);
  case KT_UNGATED_GELU_TANH: return kt_gelu_tanh16(u);
  case KT_SWIGLU_CLAMPED:
    return _mm512_mul_ps(kt_at_most16(a->limit, _mm512_mul_ps(gate, kt_sigmoid16(gate))), u);
  case KT_SOFTCAP:
    return _mm512_mul_ps(_mm512_mul_ps(kt_capped16(a->alpha, g), kt_sigmoid16(g)),
                         kt_capped16(a->beta, u));
  default:
    return _mm512_mul_ps(_mm512_mul_ps(g, kt_sigmoid16(_mm512_mul_ps(_mm512_set1_ps(a->alpha), g))),
                         _mm512_add_ps(u, _mm512_set1_ps(a->beta)));
  }
}

#endif
