/* Activation and weighted sum with AVX-512; the same bits as epilogue_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "epilogue.h"
#include "rows.h"

KT_INLINE __m512 horner(const float *terms, int count, __m512 x) {
  __m512 sum = _mm512_set1_ps(terms[0]);
  for (int i = 1; i < count; i++) sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(terms[i]));
  return sum;
}

KT_INLINE __m512 flip_sign(__m512 x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }

KT_INLINE __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(KT_EXP_MIN), x); /* of the two, the second where unordered */
  x = _mm512_min_ps(_mm512_set1_ps(KT_EXP_MAX), x);
  const __m512 rounder = _mm512_set1_ps(KT_ROUNDER);
  const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(KT_LOG2_E), rounder);
  const __m512 n = _mm512_sub_ps(shifted, rounder);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_LN2_HIGH), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_LN2_LOW), r);
  const __m512i biased =
      _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000 - 127));
  const __m512 power = _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  return _mm512_mul_ps(horner(kt_exp_taylor, KT_EXP_TERMS, r), power);
}

KT_INLINE __m512 sigmoid(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exponential(flip_sign(x))));
}

KT_INLINE __m512 error_function(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(one, _mm512_fmadd_ps(_mm512_set1_ps(KT_ERF_P), size, one));
  const __m512 decay = exponential(flip_sign(_mm512_mul_ps(size, size)));
  const __m512 rest = _mm512_mul_ps(horner(kt_erf_poly, KT_ERF_TERMS, t), decay);
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_or_ps(_mm512_andnot_ps(_mm512_set1_ps(-0.0f), _mm512_sub_ps(one, rest)), sign);
}

KT_INLINE __m512 gated(const kt_activation *a, __m512 g, __m512 u) {
  const __m512 one = _mm512_set1_ps(1.0f);
  if (a->function == KT_GELU) {
    const __m512 step =
        _mm512_add_ps(one, error_function(_mm512_mul_ps(g, _mm512_set1_ps(KT_SQRT_HALF))));
    return _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), g), step), u);
  }
  if (a->function == KT_GELU_TANH) {
    const __m512 square = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.044715f), g), g);
    const __m512 z =
        _mm512_mul_ps(_mm512_set1_ps(KT_SQRT_8_OVER_PI), _mm512_fmadd_ps(square, g, g));
    return _mm512_mul_ps(_mm512_mul_ps(g, sigmoid(z)), u);
  }
  const __m512 s = sigmoid(_mm512_mul_ps(_mm512_set1_ps(a->alpha), g));
  return _mm512_mul_ps(_mm512_mul_ps(g, s), _mm512_add_ps(u, _mm512_set1_ps(a->beta)));
}

KT_INLINE __m512 with_bias(const float *value, const float *bias, int r) {
  const __m512 v = _mm512_loadu_ps(value + r);
  return bias ? _mm512_add_ps(v, _mm512_loadu_ps(bias + r)) : v;
}

static void activate(const kt_activation *a, const float *gate, const float *up,
                     const float *gate_bias, const float *up_bias, float *out) {
  const __m512 most = _mm512_set1_ps(a->limit), least = _mm512_set1_ps(-a->limit);
  for (int r = 0; r < KT_STRIP; r += 16) {
    const __m512 g = _mm512_min_ps(most, with_bias(gate, gate_bias, r));
    const __m512 u = _mm512_min_ps(most, _mm512_max_ps(least, with_bias(up, up_bias, r)));
    _mm512_storeu_ps(out + r, gated(a, g, u));
  }
}

static void accumulate(float weight, const float *product, const float *bias, float *y) {
  const __m512 w = _mm512_set1_ps(weight);
  for (int r = 0; r < KT_STRIP; r += 16)
    _mm512_storeu_ps(y + r,
                     _mm512_fmadd_ps(w, with_bias(product, bias, r), _mm512_loadu_ps(y + r)));
}

static void widen(const uint16_t *x, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i += 16) {
    const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(x + i));
    _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
}

static void finish(const float *part, int64_t parts, int64_t stride, int64_t n, uint16_t *y) {
  for (int64_t i = 0; i < n; i += 16) {
    __m512 sum = _mm512_loadu_ps(part + i);
    for (int64_t p = 1; p < parts; p++)
      sum = _mm512_add_ps(sum, _mm512_loadu_ps(part + p * stride + i));
    float values[16];
    _mm512_storeu_ps(values, sum);
    kt_rows_bf16_avx512(values, 16, y + i);
  }
}

const kt_epilogue kt_epilogue_avx512 = {activate, accumulate, widen, finish};

KT_TARGET_END
#endif
