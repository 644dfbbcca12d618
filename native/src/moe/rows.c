/* Activation rows: their layout, and the scalar reference for their codes. */
#include "rows.h"

enum { KT_LINE = 64 };

static size_t whole_lines(size_t size) { return (size + KT_LINE - 1) / KT_LINE * KT_LINE; }

size_t kt_rows_codes_size(kt_rows_kind kind, int64_t cols) {
  return whole_lines((size_t)cols * (kind == KT_ROWS_BF16 ? 2 : 1));
}

size_t kt_rows_stride(kt_rows_kind kind, int64_t cols, int64_t group) {
  const size_t codes = kt_rows_codes_size(kind, cols);
  if (kind != KT_ROWS_GROUP) return codes + KT_LINE;
  return codes + whole_lines((size_t)(cols / group) * (sizeof(float) + sizeof(int32_t)));
}

void kt_rows_codes_scalar(const float *x, int64_t cols, int8_t *codes, float *scale, int32_t *sum) {
  const uint32_t max_bits = kt_row_max_bits(x, cols);
  float inverse;
  *scale = kt_rows_scale(max_bits, &inverse);
  *sum = 0;
  for (int64_t k = 0; k < cols; k++) {
    codes[k] = max_bits < KT_NONFINITE_BITS ? (int8_t)kt_round_even(x[k] * inverse) : 0;
    *sum += codes[k];
  }
}

void kt_rows_bf16_scalar(const float *x, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i++) out[i] = kt_bf16_bits(x[i]);
}

/* Beyond 65520 the nearest number is infinity; below 2^-14 steps are 2^-24, which adding 1/2 (whose
 * own steps they are) rounds to. */
static uint16_t half_of(float x) {
  const uint32_t bits = kt_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  if (magnitude > KT_NONFINITE_BITS) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (magnitude < 0x38800000u)
    return (uint16_t)(sign | (kt_bits(kt_float(magnitude) + 0.5f) - kt_bits(0.5f)));
  return (uint16_t)(sign | ((rounded >> 13) - ((127u - 15u) << 10)));
}

void kt_rows_f16_scalar(const float *x, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i++) out[i] = half_of(x[i]);
}

static kt_rows_codes_fn *const to_codes[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_rows_codes_scalar,
#if KT_X86
    [KT_ISA_AVX512] = kt_rows_codes_avx512,
#endif
};

static kt_rows_16_fn *const to_bf16[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_rows_bf16_scalar,
#if KT_X86
    [KT_ISA_AVX512] = kt_rows_bf16_avx512,
#endif
};

static kt_rows_16_fn *const to_f16[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_rows_f16_scalar,
#if KT_X86
    [KT_ISA_AVX512] = kt_rows_f16_avx512,
#endif
};

void kt_rows_store(int dtype, const float *x, int64_t n, void *out) {
  if (dtype == KT_F32)
    memcpy(out, x, (size_t)n * sizeof *x);
  else
    (dtype == KT_F16 ? KT_CELL(to_f16) : KT_CELL(to_bf16))(x, n, out);
}

static void quantize_groups(int64_t cols, int64_t group, const float *x, uint8_t *row) {
  const int64_t groups = cols / group;
  float *scale = (float *)(void *)(row + kt_rows_codes_size(KT_ROWS_GROUP, cols));
  int32_t *sum = (int32_t *)(void *)(scale + groups);
  kt_rows_codes_fn *quantize = KT_CELL(to_codes);
  for (int64_t g = 0; g < groups; g++)
    quantize(x + g * group, group, (int8_t *)row + g * group, scale + g, sum + g);
}

void kt_rows_quantize(kt_rows_kind kind, int64_t cols, int64_t group, const float *x,
                      uint8_t *row) {
  const size_t used = (size_t)cols * (kind == KT_ROWS_BF16 ? 2 : 1);
  uint8_t *behind = row + kt_rows_codes_size(kind, cols);
  memset(row + used, 0, (size_t)(behind - (row + used)));
  if (kind == KT_ROWS_BF16)
    KT_CELL(to_bf16)(x, cols, (uint16_t *)(void *)row);
  else if (kind == KT_ROWS_GROUP)
    quantize_groups(cols, group, x, row);
  else
    KT_CELL(to_codes)(x, cols, (int8_t *)row, (float *)(void *)behind,
                      (int32_t *)(void *)(behind + sizeof(float)));
}
