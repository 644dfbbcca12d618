/* Activation and weighted sum with AVX-512; the same bits as epilogue_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/unroll.h"
#include "activation_avx512.h"
#include "epilogue.h"

/* What is to be done to sums: constants, of which the usual ones are compiled apart. While AMX is
 * at work only one port takes these operations, so that each counts. */
typedef struct kind {
  int whole, scaled, biased; /* of whole sums `scaled` is not looked at */
  int plus;                  /* 0: nothing is added but biases */
} kind;

/* Rows row .. row + 15 of a strip, of which the scales come with it. */
KT_INLINE __m512 own_number(const kind k, const kt_sums *s, __m512 scale, int64_t strip, int64_t t,
                            int64_t row) {
  const uint8_t *const sum =
      (const uint8_t *)s->sum + ((strip * s->tokens + t) * KT_STRIP + row) * 4;
  if (!k.whole) {
    const __m512 value = _mm512_loadu_ps((const float *)(const void *)sum);
    return k.scaled ? _mm512_mul_ps(value, scale) : value;
  }
  float x_scale;
  __builtin_memcpy(&x_scale, s->x_scale + t * s->stride, sizeof x_scale);
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(sum)), scale),
                       _mm512_set1_ps(x_scale));
}

KT_INLINE __m512 number(const kind k, const kt_sums *s, __m512 scale, int64_t strip, int64_t t,
                        int64_t row) {
  const __m512 own = own_number(k, s, scale, strip, t, row);
  if (!k.plus || !s->plus) return own;
  return _mm512_add_ps(own, _mm512_loadu_ps(s->plus + (strip * s->tokens + t) * KT_STRIP + row));
}

/* 2^-shift, by which whole sums are divided: they are multiples of 2^shift, and no bit is lost. */
KT_INLINE __m512 divisor_of(const kt_sums *s) { return _mm512_set1_ps(kt_power_of_two(-s->shift)); }

KT_INLINE __m512 scale_of(const kt_sums *s, int64_t strip, int64_t row) {
  if (!s->row_scale) return _mm512_set1_ps(1.0f);
  const __m512 scale = _mm512_loadu_ps(s->row_scale + strip * KT_STRIP + row);
  if (!s->whole) return scale;
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(s->step), scale), divisor_of(s));
}

/* Adding -0 changes nothing. */
KT_INLINE __m512 bias_of(const float *bias, int64_t strip, int64_t row) {
  return bias ? _mm512_loadu_ps(bias + strip * KT_STRIP + row) : _mm512_set1_ps(-0.0f);
}

KT_INLINE __m512 with_bias(const kind k, __m512 number, __m512 bias) {
  return k.biased ? _mm512_add_ps(number, bias) : number;
}

/* Calls f(kind, ...) for the kind of sums; what no bias is added to knows it at compile time. */
#define FOR_KIND(sums, with, f, ...)                                                               \
  do {                                                                                             \
    if (with)                                                                                      \
      f(((kind){(sums)->whole, 1, 1, 1}), __VA_ARGS__);                                            \
    else if ((sums)->plus && (sums)->whole)                                                        \
      f(((kind){1, 0, 0, 1}), __VA_ARGS__);                                                        \
    else if ((sums)->plus)                                                                         \
      f(((kind){0, 1, 0, 1}), __VA_ARGS__);                                                        \
    else if ((sums)->whole)                                                                        \
      f(((kind){1, 0, 0, 0}), __VA_ARGS__);                                                        \
    else if ((sums)->row_scale)                                                                    \
      f(((kind){0, 1, 0, 0}), __VA_ARGS__);                                                        \
    else                                                                                           \
      f(((kind){0, 0, 0, 0}), __VA_ARGS__);                                                        \
  } while (0)

/* Columns of y that come next are in no cache: those of two strips later are fetched. */
enum { LATER = 2 * KT_STRIP };

KT_INLINE void fetch_to_write(const float *line) { __asm__ volatile("prefetchw %0" ::"m"(*line)); }

/* Works on copies of its arguments, which stores to `out` could otherwise change for all that the
 * compiler knows. */
KT_INLINE void activate_kind(const kind k, int function, const kt_activation *activation,
                             const kt_inner *given, int64_t first, int64_t end) {
  const kt_activation a = *activation;
  const kt_inner in = *given;
  const int gated = kt_has_gate(function);
  for (int64_t s = 0; s < in.strips; s++)
    for (int64_t r = 0; r < KT_STRIP; r += 16) {
      const __m512 u_scale = scale_of(&in.up, s, r), u_bias = bias_of(in.up_bias, s, r);
      const __m512 g_scale = gated ? scale_of(&in.gate, s, r) : u_scale;
      const __m512 g_bias = gated ? bias_of(in.gate_bias, s, r) : u_bias;
      for (int64_t t = first; t < end; t++) {
        const __m512 u = with_bias(k, number(k, &in.up, u_scale, s, t, r), u_bias);
        const __m512 g = gated ? with_bias(k, number(k, &in.gate, g_scale, s, t, r), g_bias) : u;
        _mm512_storeu_ps(in.out + t * in.stride + s * KT_STRIP + r,
                         kt_activated_of16(function, &a, g, u).h);
      }
    }
}

/* SwiGLU of most models, of which nothing is cut or added. */
static int is_plain(const kt_activation *a, const kt_inner *in) {
  return a->alpha == 1.0f && a->beta == 0.0f && a->limit == INFINITY && !in->gate_bias &&
         !in->up_bias;
}

KT_NOINLINE void activate_plain(const kt_inner *in, int64_t first, int64_t end) {
  const kt_activation plain = {KT_SWIGLU, 1.0f, 0.0f, INFINITY};
  FOR_KIND(&in->up, 0, activate_kind, KT_SWIGLU, &plain, in, first, end);
}

KT_INLINE void activate(int function, const kt_activation *a, const kt_inner *in, int64_t first,
                        int64_t end) {
  if (function == KT_SWIGLU && is_plain(a, in))
    activate_plain(in, first, end);
  else
    activate_kind((kind){in->up.whole, 1, 1, 1}, function, a, in, first, end);
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE)

KT_INLINE void add_weighted_kind(const kind k, const kt_weighted *given, int64_t first,
                                 int64_t end) {
  const kt_weighted o = *given;
  for (int64_t s = 0; s < o.strips; s++) {
    const __m512 scale0 = scale_of(&o.down, s, 0), scale16 = scale_of(&o.down, s, 16);
    const __m512 bias0 = bias_of(o.bias, s, 0), bias16 = bias_of(o.bias, s, 16);
    for (int64_t t = first; t < end; t++) {
      const __m512 w = _mm512_set1_ps(o.weight[t]);
      float *const y = o.y + o.token[t] * o.stride + s * KT_STRIP;
      fetch_to_write(y + LATER), fetch_to_write(y + LATER + 16);
      const __m512 v0 = with_bias(k, number(k, &o.down, scale0, s, t, 0), bias0);
      const __m512 v16 = with_bias(k, number(k, &o.down, scale16, s, t, 16), bias16);
      const __mmask16 old = o.fresh[t] ? 0 : 0xffff;
      _mm512_storeu_ps(y, _mm512_fmadd_ps(w, v0, _mm512_maskz_loadu_ps(old, y)));
      _mm512_storeu_ps(y + 16, _mm512_fmadd_ps(w, v16, _mm512_maskz_loadu_ps(old, y + 16)));
    }
  }
}

static void add_weighted(const kt_weighted *o, int64_t first, int64_t end) {
  FOR_KIND(&o->down, o->bias, add_weighted_kind, o, first, end);
}

KT_INLINE void numbers_kind(const kind k, const kt_sums *given, int64_t first, int64_t end,
                            float *out) {
  const kt_sums sums = *given;
  for (int64_t r = 0; r < KT_STRIP; r += 16) {
    const __m512 scale = scale_of(&sums, 0, r);
    for (int64_t t = first; t < end; t++)
      _mm512_storeu_ps(out + t * KT_STRIP + r, number(k, &sums, scale, 0, t, r));
  }
}

static void numbers(const kt_sums *sums, int64_t first, int64_t end, float *out) {
  FOR_KIND(sums, 0, numbers_kind, sums, first, end, out);
}

static void sum(const float *const *part, int64_t parts, int64_t at, const float *add, int64_t n,
                float *y) {
  for (int64_t i = 0; i < n; i += 16) {
    __m512 total = _mm512_loadu_ps(part[0] + at + i);
    if (add) total = _mm512_add_ps(total, _mm512_loadu_ps(add + i));
    for (int64_t p = 1; p < parts; p++)
      total = _mm512_add_ps(total, _mm512_loadu_ps(part[p] + at + i));
    _mm512_storeu_ps(y + i, total);
  }
}

const kt_epilogue kt_epilogue_avx512 = {
    {KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_CELL)}, add_weighted, numbers, sum};

KT_TARGET_END
#endif
