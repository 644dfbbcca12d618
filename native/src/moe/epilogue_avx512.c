/* Activation and weighted sum with AVX-512; the same bits as epilogue_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "activation_avx512.h"
#include "epilogue.h"

/* Rows row .. row + 15 of a strip, of which the scales come with it. */
KT_INLINE __m512 number(const kt_sums *s, __m512 scale, int64_t strip, int64_t t, int64_t row) {
  const uint8_t *const sum =
      (const uint8_t *)s->sum + ((strip * s->tokens + t) * KT_STRIP + row) * 4;
  if (!s->whole) return _mm512_mul_ps(_mm512_loadu_ps((const float *)(const void *)sum), scale);
  float x_scale;
  __builtin_memcpy(&x_scale, s->x_scale + t * s->stride, sizeof x_scale);
  const __m512i shifted = _mm512_srai_epi32(_mm512_loadu_si512(sum), (unsigned)s->shift);
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(shifted), scale), _mm512_set1_ps(x_scale));
}

KT_INLINE __m512 scale_of(const kt_sums *s, int64_t strip, int64_t row) {
  const __m512 one = _mm512_set1_ps(1.0f);
  if (!s->row_scale) return one;
  const __m512 scale = _mm512_loadu_ps(s->row_scale + strip * KT_STRIP + row);
  return s->whole ? _mm512_mul_ps(_mm512_set1_ps(s->step), scale) : scale;
}

/* Adding -0 changes nothing. */
KT_INLINE __m512 bias_of(const float *bias, int64_t strip, int64_t row) {
  return bias ? _mm512_loadu_ps(bias + strip * KT_STRIP + row) : _mm512_set1_ps(-0.0f);
}

/* Columns of y that come next are in no cache: those of two strips later are fetched. */
enum { LATER = 2 * KT_STRIP };

KT_INLINE void fetch_to_write(const float *line) { __asm__ volatile("prefetchw %0" ::"m"(*line)); }

/* Works on copies of its arguments, which stores to `out` could otherwise change for all that the
 * compiler knows. */
KT_INLINE void activate(int function, const kt_activation *activation, const kt_inner *given,
                        int64_t first, int64_t end) {
  const kt_activation a = *activation;
  const kt_inner in = *given;
  const int gated = kt_has_gate(function);
  for (int64_t s = 0; s < in.strips; s++)
    for (int64_t r = 0; r < KT_STRIP; r += 16) {
      const __m512 u_scale = scale_of(&in.up, s, r), u_bias = bias_of(in.up_bias, s, r);
      const __m512 g_scale = gated ? scale_of(&in.gate, s, r) : u_scale;
      const __m512 g_bias = gated ? bias_of(in.gate_bias, s, r) : u_bias;
      for (int64_t t = first; t < end; t++) {
        const __m512 u = _mm512_add_ps(number(&in.up, u_scale, s, t, r), u_bias);
        const __m512 g = gated ? _mm512_add_ps(number(&in.gate, g_scale, s, t, r), g_bias) : u;
        _mm512_storeu_ps(in.out + t * in.stride + s * KT_STRIP + r,
                         kt_activated_of16(function, &a, g, u).h);
      }
    }
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE)

KT_INLINE void accumulate_strip(const kt_weighted *o, int64_t s, int64_t first, int64_t end) {
  const __m512 scale0 = scale_of(&o->down, s, 0), scale16 = scale_of(&o->down, s, 16);
  const __m512 bias0 = bias_of(o->bias, s, 0), bias16 = bias_of(o->bias, s, 16);
  for (int64_t t = first; t < end; t++) {
    const __m512 w = _mm512_set1_ps(o->weight[t]);
    float *const y = o->y + o->token[t] * o->stride + s * KT_STRIP;
    fetch_to_write(y + LATER), fetch_to_write(y + LATER + 16);
    const __m512 v0 = _mm512_add_ps(number(&o->down, scale0, s, t, 0), bias0);
    const __m512 v16 = _mm512_add_ps(number(&o->down, scale16, s, t, 16), bias16);
    const __mmask16 old = o->fresh[t] ? 0 : 0xffff;
    _mm512_storeu_ps(y, _mm512_fmadd_ps(w, v0, _mm512_maskz_loadu_ps(old, y)));
    _mm512_storeu_ps(y + 16, _mm512_fmadd_ps(w, v16, _mm512_maskz_loadu_ps(old, y + 16)));
  }
}

static void add_weighted(const kt_weighted *given, int64_t first, int64_t end) {
  const kt_weighted o = *given;
  for (int64_t s = 0; s < o.strips; s++) accumulate_strip(&o, s, first, end);
}

static void numbers(const kt_sums *given, int64_t first, int64_t end, float *out) {
  const kt_sums sums = *given;
  for (int64_t r = 0; r < KT_STRIP; r += 16) {
    const __m512 scale = scale_of(&sums, 0, r);
    for (int64_t t = first; t < end; t++)
      _mm512_storeu_ps(out + t * KT_STRIP + r, number(&sums, scale, 0, t, r));
  }
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

const kt_epilogue kt_epilogue_avx512 = {
    {KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_CELL)}, add_weighted, numbers, sum};

KT_TARGET_END
#endif
