/* The reference for what a backward pass does besides matrix products. */
#include "../cpu.h"
#include "../quantize/rounding.h"
#include "gradients.h"
#include "random.h"

static float wide(uint16_t half) { return kt_float((uint32_t)half << 16); }

/* bf16, ties to even; any NaN becomes one NaN. */
static uint16_t nearest_bf16(float x) {
  const uint32_t bits = kt_bits(x);
  return isnan(x) ? KT_BF16_NAN : (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* What the down product has read in the place of h, column r of token t. */
static float as_read(const kt_inner_back *in, int64_t t, int64_t r, float h) {
  if (!in->codes) return wide(nearest_bf16(h));
  return (float)in->codes[t * in->code_stride + r] * in->code_scale[t * in->code_scale_stride];
}

static float sum_of_products(const float *a, const float *b) {
  float sum[16];
  for (int r = 0; r < 16; r++) sum[r] = fmaf(a[16 + r], b[16 + r], a[r] * b[r]);
  for (int half = 8; half; half /= 2)
    for (int r = 0; r < half; r++) sum[r] += sum[r + half];
  return isnan(*sum) ? kt_float(KT_F32_NAN) : *sum;
}

static void activate_back_token(int function, const kt_activation *a, const kt_inner_back *in,
                                int64_t t) {
  const float *base = in->base + t * KT_STRIP;
  float read[KT_STRIP];
  for (int64_t r = 0; r < KT_STRIP; r++) {
    const int64_t saved = t * in->saved_stride + r, out = t * in->stride + r;
    const float gate = kt_has_gate(function) ? wide(in->gate[saved]) : 0.0f;
    const float up = wide(in->up[saved]);
    const kt_activated f = kt_activated_of(function, a, gate, up);
    const float d = in->lora ? base[r] + in->lora[t * KT_STRIP + r] : base[r];
    const float weighted = in->weight[t] * d;
    if (kt_has_gate(function)) in->d_gate[out] = nearest_bf16(weighted * f.gate_slope);
    in->d_up[out] = nearest_bf16(weighted * f.up_slope);
    if (in->middle) in->middle[out] = nearest_bf16(f.h);
    read[r] = as_read(in, t, r, f.h);
  }
  in->dot[t] = sum_of_products(base, read);
}

static void activate_back(int function, const kt_activation *a, const kt_inner_back *in) {
  for (int64_t t = 0; t < in->tokens; t++) activate_back_token(function, a, in, t);
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE_BACK)

static void outer(const kt_outer *o) {
  for (int64_t j = 0; o->fresh && j < o->rank; j++)
    for (int64_t c = 0; c < o->cols; c++) o->out[j * o->row + c * o->col] = 0.0f;
  for (int64_t i = 0; i < o->count; i++) {
    const float *a = o->a + i * o->a_stride;
    const int64_t at = o->index ? o->index[i] : i;
    const uint16_t *b = (const uint16_t *)(const void *)(o->b + at * o->b_stride);
    for (int64_t j = 0; j < o->rank; j++)
      for (int64_t c = 0; c < o->cols; c++) {
        float *out = o->out + j * o->row + c * o->col;
        *out = fmaf(a[j], wide(b[c]), *out);
      }
  }
}

/* The next number on the side of `value`. */
static uint16_t on_its_side(float value, float cut, uint16_t rounded) {
  const int beyond = fabsf(value) > cut;
  if (beyond == (fabsf(wide(rounded)) > cut)) return rounded;
  return (uint16_t)(beyond ? rounded + 1 : rounded - 1);
}

static void keep(const kt_keep *k, int64_t first, int64_t end) {
  for (int64_t t = first; t < end; t++)
    for (int64_t r = 0; r < KT_STRIP; r++) {
      const float product = k->products[t * KT_STRIP + r];
      const float value = k->bias ? product + k->bias[r] : product;
      k->rows[t * k->stride + r] = on_its_side(value, k->cut, nearest_bf16(value));
    }
}

static void drop_bf16(const kt_drop *drop, int64_t pair, int64_t first, int64_t n, uint16_t *row) {
  const kt_row_key key = kt_key_of_row(drop->seed, pair, drop->input);
  for (int64_t i = 0; i < n; i++)
    if (kt_random_bits(key, (uint32_t)(first + i)) < drop->below) row[i] = 0;
}

static void drop_f32(const kt_drop *drop, int64_t pair, int64_t first, int64_t n, float *row) {
  const kt_row_key key = kt_key_of_row(drop->seed, pair, drop->input);
  for (int64_t i = 0; i < n; i++)
    if (kt_random_bits(key, (uint32_t)(first + i)) < drop->below) row[i] = 0.0f;
}

const kt_gradients kt_gradients_scalar = {
    {KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_BACK_CELL)}, outer, keep, drop_bf16, drop_f32};

const kt_gradients *const kt_gradients_of[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_gradients_scalar,
#if KT_X86
    [KT_ISA_AVX512] = &kt_gradients_avx512,
#endif
};

kt_outer_fn *kt_outer_best(void) {
#if KT_X86
  if (kt_isa_active() == KT_ISA_AMX) return kt_outer_amx;
#endif
  return KT_CELL(kt_gradients_of)->outer;
}
