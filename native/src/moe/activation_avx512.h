/* activation_avx512.h - activation.h, 16 numbers at a time; the same bits. */
#ifndef KT_ACTIVATION_AVX512_H
#define KT_ACTIVATION_AVX512_H

#include "../simd/exponential_avx512.h"
#include "activation.h"

KT_INLINE __m512 kt_flip_sign16(__m512 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }

/* Whether a value is this constant, which then takes no instructions. */
#define KT_IS_CONSTANT(x, constant) (__builtin_constant_p((x) == (constant)) && (x) == (constant))

/* Of the two operands of max and min, the second where they are unordered. */
KT_INLINE __m512 kt_at_least16(float limit, __m512 x) {
  return KT_IS_CONSTANT(limit, -INFINITY) ? x : _mm512_max_ps(_mm512_set1_ps(limit), x);
}
KT_INLINE __m512 kt_at_most16(float limit, __m512 x) {
  return KT_IS_CONSTANT(limit, INFINITY) ? x : _mm512_min_ps(_mm512_set1_ps(limit), x);
}

KT_INLINE __m512 kt_exponential16(__m512 x) {
  const __m512 rounder = _mm512_set1_ps(KT_ROUNDER);
  const __m512 within = kt_at_most16(KT_EXP_MAX, kt_at_least16(KT_EXP_MIN, x));
  const __m512 shifted = _mm512_fmadd_ps(within, _mm512_set1_ps(KT_LOG2_E), rounder);
  const __m512 n = _mm512_sub_ps(shifted, rounder);
  const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_LN2), within);
  const __m512i p = _mm512_castps_si512(kt_horner16(kt_exp_best, KT_EXP_BEST_TERMS, r));
  return _mm512_castsi512_ps(
      _mm512_add_epi32(p, _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

KT_INLINE __m512 kt_with_sign_of16(__m512 x, __m512 size) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(sign, size), _mm512_and_ps(x, sign));
}

KT_INLINE __m512 kt_hyperbolic_tangent16(__m512 x) {
  const __m512 size = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
  const kt_reduced16 e =
      kt_reduce16(kt_at_most16(KT_EXP_MAX, _mm512_mul_ps(_mm512_set1_ps(2.0f), size)));
  const __m512 power = kt_power_of_two16(e.n);
  const __m512 p = _mm512_mul_ps(kt_horner16(kt_exp_taylor, KT_EXP_TERMS - 1, e.r), e.r);
  const __m512 less_one = _mm512_fmadd_ps(power, p, _mm512_sub_ps(power, one));
  const __m512 more_one = _mm512_add_ps(less_one, _mm512_set1_ps(2.0f));
  return kt_with_sign_of16(x, _mm512_div_ps(less_one, more_one));
}

typedef struct kt_graded16 {
  __m512 value, slope;
} kt_graded16;

KT_INLINE __m512 kt_decaying16(__m512 x) {
  return kt_at_most16(KT_EXP_MAX, kt_at_least16(-KT_EXP_MAX, x));
}

KT_INLINE kt_graded16 kt_flat_beyond16(float limit, __m512 x, kt_graded16 f) {
  const __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_set1_ps(limit), x, _CMP_LT_OQ);
  return (kt_graded16){f.value, _mm512_mask_mov_ps(f.slope, beyond, _mm512_setzero_ps())};
}

KT_INLINE kt_graded16 kt_sigmoid16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), e = kt_exponential16(kt_flip_sign16(x));
  const __m512 s = _mm512_div_ps(one, _mm512_add_ps(one, e));
  return (kt_graded16){s, _mm512_mul_ps(s, _mm512_mul_ps(e, s))};
}

KT_INLINE kt_graded16 kt_swish16(float alpha, __m512 x) {
  const __m512 z = _mm512_mul_ps(_mm512_set1_ps(alpha), x);
  const kt_graded16 s = kt_sigmoid16(z);
  return (kt_graded16){_mm512_mul_ps(x, s.value),
                       _mm512_fmadd_ps(kt_decaying16(z), s.slope, s.value)};
}

KT_INLINE __m512 kt_error_function16(__m512 x, __m512 decay) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(KT_ERF_P), size, one));
  const __m512 rest = _mm512_mul_ps(kt_horner16(kt_erf_poly, KT_ERF_TERMS, t), decay);
  return kt_with_sign_of16(x, _mm512_sub_ps(one, rest));
}

KT_INLINE kt_graded16 kt_gelu16(__m512 x) {
  const __m512 half = _mm512_set1_ps(0.5f), root = _mm512_mul_ps(x, _mm512_set1_ps(KT_SQRT_HALF));
  const __m512 decay = kt_exponential16(kt_flip_sign16(_mm512_mul_ps(root, root)));
  const __m512 step = _mm512_add_ps(_mm512_set1_ps(1.0f), kt_error_function16(root, decay));
  const __m512 rise = _mm512_mul_ps(kt_decaying16(x), _mm512_set1_ps(KT_SQRT_1_OVER_2_PI));
  return (kt_graded16){_mm512_mul_ps(_mm512_mul_ps(half, x), step),
                       _mm512_fmadd_ps(rise, decay, _mm512_mul_ps(half, step))};
}

KT_INLINE kt_graded16 kt_gelu_tanh16(__m512 x) {
  const __m512 scale = _mm512_set1_ps(KT_SQRT_8_OVER_PI), near = kt_decaying16(x);
  const __m512 square = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(KT_GELU_CUBIC), x), x);
  const kt_graded16 s = kt_sigmoid16(_mm512_mul_ps(scale, _mm512_fmadd_ps(square, x, x)));
  const __m512 cubic = _mm512_mul_ps(_mm512_set1_ps(3.0f * KT_GELU_CUBIC), near);
  const __m512 rise = _mm512_mul_ps(scale, _mm512_fmadd_ps(cubic, near, _mm512_set1_ps(1.0f)));
  return (kt_graded16){_mm512_mul_ps(x, s.value),
                       _mm512_fmadd_ps(_mm512_mul_ps(near, rise), s.slope, s.value)};
}

KT_INLINE kt_graded16 kt_capped16(float cap, __m512 x) {
  const __m512 size = _mm512_set1_ps(cap), one = _mm512_set1_ps(1.0f);
  if (cap == INFINITY) return (kt_graded16){x, one};
  const __m512 t = kt_hyperbolic_tangent16(_mm512_div_ps(x, size));
  return (kt_graded16){_mm512_mul_ps(size, t), _mm512_fnmadd_ps(t, t, one)};
}

KT_INLINE kt_graded16 kt_soft16(float alpha, __m512 g) {
  const kt_graded16 c = kt_capped16(alpha, g), s = kt_sigmoid16(g);
  const __m512 rise = _mm512_mul_ps(kt_decaying16(c.value), s.slope);
  return (kt_graded16){_mm512_mul_ps(c.value, s.value), _mm512_fmadd_ps(c.slope, s.value, rise)};
}

KT_INLINE kt_graded16 kt_gate_factor16(int function, const kt_activation *a, __m512 gate) {
  const __m512 g = kt_at_most16(a->limit, gate);
  switch (function) {
  case KT_SWIGLU: return kt_flat_beyond16(a->limit, gate, kt_swish16(a->alpha, g));
  case KT_GELU: return kt_flat_beyond16(a->limit, gate, kt_gelu16(g));
  case KT_GELU_TANH: return kt_flat_beyond16(a->limit, gate, kt_gelu_tanh16(g));
  case KT_SOFTCAP: return kt_flat_beyond16(a->limit, gate, kt_soft16(a->alpha, g));
  case KT_SWIGLU_CLAMPED: {
    const kt_graded16 f = kt_swish16(1.0f, gate);
    return kt_flat_beyond16(a->limit, f.value,
                            (kt_graded16){kt_at_most16(a->limit, f.value), f.slope});
  }
  default: return (kt_graded16){_mm512_set1_ps(1.0f), _mm512_setzero_ps()};
  }
}

KT_INLINE kt_graded16 kt_up_within16(int function, const kt_activation *a, __m512 u) {
  const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);
  const __m512 positive = kt_at_least16(0.0f, u);
  switch (function) {
  case KT_SWIGLU:
    return (kt_graded16){a->beta == 0.0f ? u : _mm512_add_ps(u, _mm512_set1_ps(a->beta)), one};
  case KT_SOFTCAP: return kt_capped16(a->beta, u);
  case KT_RELU2:
    return (kt_graded16){_mm512_mul_ps(positive, positive),
                         _mm512_mul_ps(_mm512_set1_ps(2.0f), positive)};
  case KT_RELU:
    return (kt_graded16){positive,
                         _mm512_mask_mov_ps(one, _mm512_cmp_ps_mask(u, zero, _CMP_LE_OQ), zero)};
  case KT_UNGATED_GELU: return kt_gelu16(u);
  case KT_UNGATED_GELU_TANH: return kt_gelu_tanh16(u);
  default: return (kt_graded16){u, one};
  }
}

typedef struct kt_activated16 {
  __m512 h, gate_slope, up_slope;
} kt_activated16;

KT_INLINE kt_activated16 kt_activated_of16(int function, const kt_activation *a, __m512 gate,
                                           __m512 up) {
  const __m512 u = kt_at_most16(a->limit, kt_at_least16(-a->limit, up));
  const kt_graded16 g = kt_gate_factor16(function, a, gate);
  const kt_graded16 f =
      kt_flat_beyond16(a->limit, _mm512_abs_ps(up), kt_up_within16(function, a, u));
  return (kt_activated16){_mm512_mul_ps(g.value, f.value), _mm512_mul_ps(g.slope, f.value),
                          _mm512_mul_ps(g.value, f.slope)};
}

#endif
