/* The truth of decoding: stored numbers to binary32, [rows, cols] row-major. Selections are
 * bit masks, so that compilers vectorise the loops for any machine. */
#include "../quantize/rounding.h"
#include "matrix.h"

/* `yes` where the condition is 1, `no` where it is 0. */
static inline uint32_t select(uint32_t condition, uint32_t yes, uint32_t no) {
  return no ^ ((no ^ yes) & (0u - condition));
}

static inline float widen_bf16(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return kt_float((uint32_t)half << 16);
}

static inline float widen_f16(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  const uint32_t subnormal = kt_bits((float)(int32_t)magnitude * 0x1p-24f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t finite = select(magnitude < 0x0400u, subnormal, normal);
  return kt_float(sign | select(magnitude >= 0x7c00u, special, finite));
}

/* E4M3FN: bias 7, no infinities, magnitude 0x7f is NaN. */
static inline float widen_e4m3(const uint8_t *at) {
  const uint32_t magnitude = *at & 0x7fu, sign = (uint32_t)(*at & 0x80u) << 24;
  const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  const uint32_t subnormal = kt_bits((float)(int32_t)magnitude * 0x1p-9f);
  const uint32_t finite = select(magnitude < 0x08u, subnormal, normal);
  return kt_float(sign | select(magnitude == 0x7fu, 0x7fc00000u, finite));
}

static inline float widen_f32(const uint8_t *at) {
  float value;
  memcpy(&value, at, sizeof value);
  return value;
}

#define WIDEN_ROW(widen, size)                                                                     \
  for (int64_t k = 0; k < cols; k++) row[k] = widen(from + k * (size))

/* A row that lies contiguously from `from` on. */
static void widen_row(const uint8_t *from, int dtype, int64_t cols, float *restrict row) {
  switch (dtype) {
  case KT_BF16: WIDEN_ROW(widen_bf16, 2); break;
  case KT_F16: WIDEN_ROW(widen_f16, 2); break;
  case KT_F32: WIDEN_ROW(widen_f32, 4); break;
  case KT_F8_E4M3: WIDEN_ROW(widen_e4m3, 1); break;
  }
}

#define WIDEN_ACROSS(widen, size)                                                                  \
  do {                                                                                             \
    for (int64_t k = 0; k < cols; k++)                                                             \
      for (int64_t r = 0; r < count; r++)                                                          \
        out[r * stride + k] = widen(from + k * step + r * (size));                                 \
  } while (0)

/* Rows that lie next to each other, `step` bytes from one column to the next: column by
 * column, so that a cache line of the source is read once for all of them. */
static void widen_across(const uint8_t *from, int64_t step, int dtype, int64_t count, int64_t cols,
                         float *restrict out, int64_t stride) {
  switch (dtype) {
  case KT_BF16: WIDEN_ACROSS(widen_bf16, 2); break;
  case KT_F16: WIDEN_ACROSS(widen_f16, 2); break;
  case KT_F32: WIDEN_ACROSS(widen_f32, 4); break;
  case KT_F8_E4M3: WIDEN_ACROSS(widen_e4m3, 1); break;
  }
}

static void scale_row(const kt_matrix *m, int64_t n, float *restrict row) {
  const float *scales = kt_scale_row(m, n);
  for (int64_t k = 0, end; k < m->cols; k = end) {
    end = kt_scale_block_end(m, k);
    const float scale = scales[(m->col_origin + k) / m->block_cols];
    for (int64_t i = k; i < end; i++) row[i] *= scale;
  }
}

/* Round to nearest, ties to even, at bit 16. NaN and Inf keep being what they are. */
static void round_row_to_bf16(int64_t cols, float *restrict row) {
  for (int64_t k = 0; k < cols; k++) {
    const uint32_t bits = kt_bits(row[k]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    row[k] = kt_float(select((bits & 0x7f800000u) == 0x7f800000u, bits, rounded));
  }
}

void kt_decode_rows_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,
                           int64_t stride) {
  const int64_t size = kt_dtype_size(m->dtype);
  const uint8_t *from = (const uint8_t *)m->data + row * m->row_stride * size;
  if (m->col_stride != 1)
    widen_across(from, m->col_stride * size, m->dtype, count, m->cols, out, stride);
  for (int64_t r = 0; r < count; r++) {
    float *const to = out + r * stride;
    if (m->col_stride == 1) widen_row(from + r * m->row_stride * size, m->dtype, m->cols, to);
    if (m->block_scale) scale_row(m, row + r, to);
    if (m->round_to_bf16) round_row_to_bf16(m->cols, to);
  }
}
