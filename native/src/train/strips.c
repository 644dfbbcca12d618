/* Strips without vector instructions, and which cell of a level makes or multiplies them. */
#include "strips.h"

#include "../bf16/bf16.h"
#include "../cpu.h"
#include "../simd/bits.h"

#include <float.h>
#include <math.h>
#include <string.h>

kt_transpose_fn *kt_format_transpose(const kt_weight_format *format) {
  return KT_CELL(format->transpose);
}

kt_transposed_fn *kt_format_transposed(const kt_weight_format *format) {
  return kt_isa_active() == KT_ISA_AMX ? format->transposed : NULL;
}

kt_product_fn *kt_bf16_adding_product(void) {
  static kt_product_fn *const product[KT_LEVELS] = {
      [KT_ISA_SCALAR] = kt_bf16_adding_product_scalar,
#if KT_X86
      [KT_ISA_AVX512_ZEN] = kt_bf16_adding_product_avx512,
      [KT_ISA_AVX512] = kt_bf16_adding_product_float_avx512,
      [KT_ISA_AMX] = kt_bf16_adding_product_amx,
#endif
  };
  return KT_CELL(product);
}

kt_adding_stream_fn *kt_bf16_adding_stream(void) {
#if KT_X86
  if (kt_isa_active() == KT_ISA_AMX) return kt_bf16_adding_stream_amx;
#endif
  return NULL;
}

/* ---- Scales ---------------------------------------------------------------- */

int kt_scales_to_fold(const kt_layout *layout) {
  const uint32_t contained = kt_format_of(layout)->scaled_strips;
  return layout->scale_dtype != KT_SCALE_NONE && !(contained >> layout->scale_dtype & 1);
}

/* `count` scales from `first` on, times `units`. */
static void read_scales(const kt_weight *w, int64_t first, int64_t count, float units,
                        float *scale) {
  const float *const singles = (const float *)w->scale + first;
  const uint16_t *const halves = (const uint16_t *)w->scale + first;
  if (w->layout.scale_dtype == KT_SCALE_F32)
    for (int64_t i = 0; i < count; i++) scale[i] = units * singles[i];
  else
    for (int64_t i = 0; i < count; i++) scale[i] = units * kt_float((uint32_t)halves[i] << 16);
}

void kt_fold_scales(const kt_weight *w, int64_t column, float *scale) {
  const kt_weight_format *const format = kt_format_of(&w->layout);
  const float units = (float)format->scale_units;
  const int64_t group = w->layout.group;
  if (!group) {
    read_scales(w, 0, w->rows, units, scale);
    return;
  }
  for (int64_t n = 0; n < w->rows; n += KT_STRIP) {
    if (format->scale_rows == 1) {
      const int64_t at = kt_group_scale_index(w->cols, group, n, column / group);
      read_scales(w, at, KT_STRIP, units, scale + n);
    } else {
      read_scales(w, n / KT_STRIP * (w->cols / group) + column / group, 1, units, scale + n);
      for (int i = 1; i < KT_STRIP; i++) scale[n + i] = scale[n];
    }
  }
}

/* ---- Plain matrices -------------------------------------------------------- */

static uint16_t number(const kt_plain *m, int64_t row, int64_t col) {
  if (row < 0 || row >= m->rows || col < 0 || col >= m->cols) return 0;
  const int64_t i = row * m->cols + col;
  if (m->dtype == KT_BF16) return ((const uint16_t *)m->data)[i];
  return kt_bf16_bits(((const float *)m->data)[i]);
}

static void store(uint8_t *strip, int64_t i, int64_t k, uint16_t bits) {
  memcpy(strip + kt_strip_at(i, k), &bits, sizeof bits);
}

static void rows(const kt_plain *m, int64_t first, int64_t shift, int64_t count, uint8_t *strip) {
  for (int64_t i = 0; i < KT_STRIP; i++)
    for (int64_t k = 0; k < count; k++) store(strip, i, k, number(m, first + i, k - shift));
}

static void columns(const kt_plain *m, int64_t first, int64_t shift, int64_t count,
                    uint8_t *strip) {
  for (int64_t k = 0; k < count; k++)
    for (int64_t i = 0; i < KT_STRIP; i++) store(strip, i, k, number(m, k - shift, first + i));
}

static uint16_t scaled(uint16_t bits, float scale) {
  const float value = kt_float((uint32_t)bits << 16) * scale;
  return fabsf(value) < FLT_MIN ? (uint16_t)(kt_bits(value) >> 16 & 0x8000) : kt_bf16_bits(value);
}

static void fold(const uint16_t *row, const float *scale, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i++) out[i] = scaled(row[i], scale[i]);
}

static void split_number(float value, float reciprocal, int8_t *high, int8_t *low) {
  const long code = lrintf(value * reciprocal);
  *high = (int8_t)((code + 128) >> 8);
  *low = (int8_t)(code - 256L * *high);
}

static float split(const uint16_t *row, const float *factor, int64_t n, int8_t *high, int8_t *low) {
  float amax = 0.0f;
  int finite = 1;
  memset(high, 0, (size_t)n);
  memset(low, 0, (size_t)n);
  for (int64_t i = 0; i < n; i++) {
    const float size = fabsf(kt_float((uint32_t)row[i] << 16) * factor[i]);
    finite &= size <= FLT_MAX;
    if (size > amax) amax = size;
  }
  const float scale = amax * KT_SPLIT_STEP;
  if (!finite) return NAN;
  if (scale < FLT_MIN) return 0.0f;
  for (int64_t i = 0; i < n; i++)
    split_number(kt_float((uint32_t)row[i] << 16) * factor[i], 1.0f / scale, high + i, low + i);
  return scale;
}

const kt_strips kt_strips_scalar = {rows, columns, fold, split};

const kt_strips *const kt_strips_of[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_strips_scalar,
#if KT_X86
    [KT_ISA_AVX512_BF16] = &kt_strips_avx512,
#endif
};
