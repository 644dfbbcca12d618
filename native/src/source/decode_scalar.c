/* The reference decoders: stored numbers to binary32, [rows, cols] row-major. Selections are
 * bit masks, so that compilers vectorise the loops for any machine. */
#include "../simd/target.h"
#include "decode.h"
#include "decode_loops.h"

static inline float widen_bf16(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return kt_float((uint32_t)half << 16);
}

/* E4M3FN: bias 7, no infinities, magnitude 0x7f is NaN. */
static inline float widen_e4m3(const uint8_t *at) {
  const uint32_t magnitude = *at & 0x7fu, sign = (uint32_t)(*at & 0x80u) << 24;
  const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
  const uint32_t subnormal = kt_bits((float)(int32_t)magnitude * 0x1p-9f);
  const uint32_t finite = kt_select(magnitude < 0x08u, subnormal, normal);
  return kt_float(sign | kt_select(magnitude == 0x7fu, 0x7fc00000u, finite));
}

static inline float widen_i8(const uint8_t *at) { return (float)(int8_t)*at; }

static inline float widen_f16(const uint8_t *at) { return kt_widen_f16(at); }

static inline float widen_f32(const uint8_t *at) {
  float value;
  memcpy(&value, at, sizeof value);
  return value;
}

/* E2M1: from 1 on the exponent field is bits 1 and 2, and bit 0 the mantissa. */
static inline float widen_e2m1(uint32_t nibble) {
  const uint32_t magnitude = nibble & 7u, sign = (nibble & 8u) << 28;
  const uint32_t normal = (magnitude << 22) + ((127u - 1u) << 23);
  const uint32_t subnormal = kt_bits((float)(int32_t)magnitude * 0.5f);
  return kt_float(sign | kt_select(magnitude < 2u, subnormal, normal));
}

/* Sign, and a magnitude in quarters; 8 is -0. */
static inline float widen_e0m3(uint32_t nibble) {
  const float magnitude = (float)(int32_t)(nibble & 7u) * 0.25f;
  return kt_float(kt_bits(magnitude) | (nibble & 8u) << 28);
}

static inline float widen_i4(uint32_t nibble) { return (float)((int32_t)(nibble ^ 8u) - 8); }

/* ---- One element per unit ------------------------------------------------- */

/* A row whose columns are adjacent in memory, from `from` on. */
typedef void widen_row_fn(const uint8_t *from, int64_t cols, float *restrict row);

/* Rows that lie next to each other, `step` bytes from one column to the next: column by
 * column, so that a cache line of the source is read once for all of them. */
typedef void widen_across_fn(const uint8_t *from, int64_t step, int64_t count, int64_t cols,
                             float *restrict out, int64_t stride);

static void decode_elements(const kt_matrix *m, int64_t row, int64_t count, float *out,
                            int64_t stride, int64_t size, widen_row_fn *widen_row,
                            widen_across_fn *widen_across) {
  const uint8_t *from = (const uint8_t *)m->data + row * m->row_stride * size;
  if (m->col_stride != 1) widen_across(from, m->col_stride * size, count, m->cols, out, stride);
  for (int64_t r = 0; r < count; r++) {
    float *const to = out + r * stride;
    if (m->col_stride == 1) widen_row(from + r * m->row_stride * size, m->cols, to);
    kt_finish_row(m, row + r, to);
  }
}

#define DECODE_ELEMENTS(name, size)                                                                \
  static void row_##name(const uint8_t *from, int64_t cols, float *restrict row) {                 \
    for (int64_t k = 0; k < cols; k++) row[k] = widen_##name(from + k * (size));                   \
  }                                                                                                \
  static void across_##name(const uint8_t *from, int64_t step, int64_t count, int64_t cols,        \
                            float *restrict out, int64_t stride) {                                 \
    for (int64_t k = 0; k < cols; k++)                                                             \
      for (int64_t r = 0; r < count; r++)                                                          \
        out[r * stride + k] = widen_##name(from + k * step + r * (size));                          \
  }                                                                                                \
  void kt_decode_##name##_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,       \
                                 int64_t stride) {                                                 \
    decode_elements(m, row, count, out, stride, size, row_##name, across_##name);                  \
  }

DECODE_ELEMENTS(bf16, 2)
DECODE_ELEMENTS(f16, 2)
DECODE_ELEMENTS(f32, 4)
DECODE_ELEMENTS(e4m3, 1)
DECODE_ELEMENTS(i8, 1)

/* ---- Several columns of a row per unit ------------------------------------ */

typedef void widen_unit_fn(const uint8_t *unit, float *columns);

KT_INLINE void decode_units(const kt_matrix *m, int64_t row, int64_t count, float *out,
                            int64_t stride, widen_unit_fn *widen) {
  const kt_stored_unit unit = kt_dtype_find(m->dtype)->unit;
  const uint8_t *const from = (const uint8_t *)m->data + row * m->row_stride * unit.bytes;
  const int64_t units = m->cols / unit.cols, across = m->col_stride != 1;
  const int64_t outer = across ? units : count, inner = across ? count : units;
  for (int64_t i = 0; i < outer; i++)
    for (int64_t j = 0; j < inner; j++) {
      const int64_t r = across ? j : i, c = across ? i : j;
      widen(from + (r * m->row_stride + c * m->col_stride) * unit.bytes,
            out + r * stride + c * unit.cols);
    }
  for (int64_t r = 0; r < count; r++) kt_finish_row(m, row + r, out + r * stride);
}

/* Two columns in a byte. */
#define DECODE_NIBBLES(name)                                                                       \
  KT_INLINE void widen_##name##_pair(const uint8_t *unit, float *columns) {                        \
    columns[0] = widen_##name(*unit & 15u);                                                        \
    columns[1] = widen_##name(*unit >> 4);                                                         \
  }                                                                                                \
  void kt_decode_##name##_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,       \
                                 int64_t stride) {                                                 \
    decode_units(m, row, count, out, stride, widen_##name##_pair);                                 \
  }

DECODE_NIBBLES(e2m1)
DECODE_NIBBLES(e0m3)
DECODE_NIBBLES(i4)

/* Number i of a little-endian stream of `bits` each. Bytes behind the number are not read. */
KT_INLINE float widen_stream(const uint8_t *from, int bits, int i) {
  const int at = i * bits, shift = at % 8;
  uint32_t two = from[at / 8];
  if (shift + bits > 8) two |= (uint32_t)from[at / 8 + 1] << 8;
  return (float)(two >> shift & ((1u << bits) - 1));
}

#define DECODE_STREAM(bits, columns_per_unit)                                                      \
  KT_INLINE void widen_u##bits(const uint8_t *unit, float *columns) {                              \
    for (int i = 0; i < (columns_per_unit); i++) columns[i] = widen_stream(unit, bits, i);         \
  }                                                                                                \
  void kt_decode_u##bits##_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,      \
                                  int64_t stride) {                                                \
    decode_units(m, row, count, out, stride, widen_u##bits);                                       \
  }

DECODE_STREAM(2, 16)
DECODE_STREAM(3, 32)
DECODE_STREAM(4, 8)
DECODE_STREAM(5, 32)
DECODE_STREAM(6, 16)
DECODE_STREAM(7, 32)
DECODE_STREAM(8, 4)

/* E2M3: from 1 on the exponent field is bits 3 and 4, and bits 0 to 2 the mantissa. */
static inline float widen_e2m3(uint32_t code) {
  const uint32_t magnitude = code & 31u, sign = (code & 32u) << 26;
  const uint32_t normal = (magnitude << 20) + ((127u - 1u) << 23);
  const uint32_t subnormal = kt_bits((float)(int32_t)magnitude * 0.125f);
  return kt_float(sign | kt_select(magnitude < 8u, subnormal, normal));
}

/* Four columns in three bytes. */
KT_INLINE void widen_e2m3_four(const uint8_t *unit, float *columns) {
  const uint32_t four = unit[0] | (uint32_t)unit[1] << 8 | (uint32_t)unit[2] << 16;
  for (int i = 0; i < 4; i++) columns[i] = widen_e2m3(four >> 6 * i);
}

void kt_decode_e2m3_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,
                           int64_t stride) {
  decode_units(m, row, count, out, stride, widen_e2m3_four);
}

/* ---- Several rows of a column per unit ------------------------------------ */

void kt_decode_u4_awq_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,
                             int64_t stride) {
  static const int nibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const uint8_t *const from = m->data;
  for (int64_t k = 0; k < m->cols; k++)
    for (int64_t n = row; n < row + count; n++) {
      const uint8_t *const word = from + (n / 8 * m->row_stride + k * m->col_stride) * 4;
      out[(n - row) * stride + k] = widen_stream(word, 4, nibble[n % 8]);
    }
  for (int64_t r = 0; r < count; r++) kt_finish_row(m, row + r, out + r * stride);
}
