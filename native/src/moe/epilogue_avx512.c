/* Activation and weighted sum with AVX-512; the same bits as epilogue_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "activation_avx512.h"
#include "epilogue.h"

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
        _mm512_storeu_ps(in.out + t * in.stride + row, kt_activated_of16(function, &a, g, u).h);
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
