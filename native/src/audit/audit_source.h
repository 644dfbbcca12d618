/* audit_source.h - values of the source as the audit reads them: from the definition of their
 * number formats, not from source/. */
#ifndef KT_AUDIT_SOURCE_H
#define KT_AUDIT_SOURCE_H

#include "audit.h"

#include <string.h>

/* Fused products would make the bits of sums depend on the level; GCC's -std=c11 has none. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* Loops become vectors of the level only in functions that have its target. */
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* a where `first`, else b; without a branch, which would keep loops from becoming vectors. */
INLINE uint32_t choose(int first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - (uint32_t)first;
  return (a & mask) | (b & ~mask);
}

/* binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; denormals become normal. */
INLINE float f16_value(uint16_t half) {
  const uint32_t bits = half, sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const uint32_t denormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  const uint32_t finite = choose(magnitude < 0x0400u, denormal, normal);
  return from_bits(sign | choose(magnitude < 0x7c00u, finite, special));
}

/* E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f is NaN, there is no infinity. */
INLINE float f8_value(uint8_t byte) {
  const uint32_t bits = byte, sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  const uint32_t denormal = bits_of((float)(int32_t)magnitude * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t finite = choose(magnitude < 8u, denormal, normal);
  return from_bits(sign | choose(magnitude < 0x7fu, finite, 0x7fc00000u));
}

INLINE float to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

/* ---- Numbers of some columns of a row: a constant number, for vectors ------- */

/* `units` units of `size` bytes, `step` bytes apart, side by side. */
INLINE void side_by_side(const uint8_t *from, int64_t step, int64_t size, int64_t units,
                         void *out) {
  uint8_t *to = out;
  if (step == size)
    memcpy(to, from, (size_t)(size * units));
  else
    for (int64_t i = 0; i < units; i++) memcpy(to + i * size, from + i * step, (size_t)size);
}

/* <name>_values: of the units from `from` on, which hold row `row` of the matrix. */

INLINE void bf16_values(const uint8_t *from, int64_t step, int64_t row, const int cols,
                        float *out) {
  uint16_t half[KT_AUDIT_COLS];
  (void)row;
  side_by_side(from, step, 2, cols, half);
  for (int c = 0; c < cols; c++) out[c] = from_bits((uint32_t)half[c] << 16);
}

INLINE void f16_values(const uint8_t *from, int64_t step, int64_t row, const int cols, float *out) {
  uint16_t half[KT_AUDIT_COLS];
  (void)row;
  side_by_side(from, step, 2, cols, half);
  for (int c = 0; c < cols; c++) out[c] = f16_value(half[c]);
}

INLINE void f32_values(const uint8_t *from, int64_t step, int64_t row, const int cols, float *out) {
  (void)row;
  side_by_side(from, step, 4, cols, out);
}

INLINE void f8_values(const uint8_t *from, int64_t step, int64_t row, const int cols, float *out) {
  uint8_t byte[KT_AUDIT_COLS];
  (void)row;
  side_by_side(from, step, 1, cols, byte);
  for (int c = 0; c < cols; c++) out[c] = f8_value(byte[c]);
}

static void f4_values(const uint8_t *from, int64_t step, int64_t row, const int cols, float *out) {
  static const float value[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                  -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  uint8_t pair[KT_AUDIT_COLS / 2];
  (void)row;
  side_by_side(from, step, 1, cols / 2, pair);
  for (int c = 0; c < cols; c++) out[c] = value[pair[c / 2] >> c % 2 * 4 & 15];
}

INLINE uint32_t word_of(const uint8_t *at) {
  return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static void u4_values(const uint8_t *from, int64_t step, int64_t row, const int cols, float *out) {
  uint8_t word[KT_AUDIT_COLS / 8][4];
  (void)row;
  side_by_side(from, step, 4, cols / 8, word);
  for (int c = 0; c < cols; c++) out[c] = (float)(word_of(word[c / 8]) >> 4 * (c % 8) & 15);
}

/* Even rows are in the lower half of the word, odd ones in the upper. */
static void u4_awq_values(const uint8_t *from, int64_t step, int64_t row, const int cols,
                          float *out) {
  const int shift = (int)(row % 8 / 2 * 4 + row % 2 * 16);
  uint8_t word[KT_AUDIT_COLS][4];
  side_by_side(from, step, 4, cols, word);
  for (int c = 0; c < cols; c++) out[c] = (float)(word_of(word[c]) >> shift & 15);
}

/* Of each dtype: its name here, and a unit in bytes, rows and columns. */
#define AUDIT_DTYPES(each)                                                                         \
  each(KT_BF16, bf16, 2, 1, 1) each(KT_F16, f16, 2, 1, 1) each(KT_F32, f32, 4, 1, 1)               \
      each(KT_F8_E4M3, f8, 1, 1, 1) each(KT_F4_E2M1, f4, 1, 1, 2) each(KT_U4, u4, 4, 1, 8)         \
          each(KT_U4_AWQ, u4_awq, 4, 8, 1)

typedef struct audit_unit {
  int32_t bytes, rows, cols;
} audit_unit;

static const audit_unit audit_units[KT_DTYPE_COUNT] = {
#define UNIT(dtype, name, bytes, rows, cols) [dtype] = {bytes, rows, cols},
    AUDIT_DTYPES(UNIT)
#undef UNIT
};

/* ---- Where they lie ---------------------------------------------------------- */

/* Units from a first row and column of the source on; strides in units. */
typedef struct stored {
  audit_unit unit;
  const uint8_t *data;
  int64_t row_stride, col_stride;
} stored;

/* Divisions take long, and most units are elements. */
INLINE int64_t units_in(int64_t elements, int64_t per_unit) {
  return per_unit == 1 ? elements : elements / per_unit;
}

/* `rows` rows and `cols` columns further on: to the unit with that element. */
INLINE stored stored_on(stored s, int64_t rows, int64_t cols) {
  const int64_t at =
      units_in(rows, s.unit.rows) * s.row_stride + units_in(cols, s.unit.cols) * s.col_stride;
  s.data += at * s.unit.bytes;
  return s;
}

INLINE stored stored_from(const kt_matrix *m, int64_t row, int64_t col) {
  const stored whole = {audit_units[m->dtype], m->data, m->row_stride, m->col_stride};
  return stored_on(whole, row, col);
}

/* A copy of the columns of 32 rows that lie side by side: row after row would read each line of
 * memory once per row, and lines that are a power of two apart drive each other out of the caches.
 */
INLINE stored gathered(stored s, int64_t cols, uint8_t *room) {
  const int64_t run = 2 * KT_AUDIT_ROWS / s.unit.rows, size = s.unit.bytes;
  for (int64_t c = 0; c < cols / s.unit.cols; c++)
    memcpy(room + c * run * size, s.data + size * c * s.col_stride, (size_t)(run * size));
  return (stored){s.unit, room, 1, run};
}

/* ---- Scales ------------------------------------------------------------------ */

/* Where a grid of scales or zero points has the one for a row and column. */
INLINE int64_t grid_at(const kt_matrix *m, int64_t row, int64_t col) {
  const int64_t y = (m->row_origin + row) / m->block_rows;
  const int64_t x = m->group_of_col ? m->group_of_col[col] : (m->col_origin + col) / m->block_cols;
  return y * m->scale_stride + x;
}

/* Columns of a row up to where the next block may begin, at most `cols`. */
INLINE int64_t block_run(const kt_matrix *m, int64_t col, int64_t cols) {
  if (m->group_of_col) return 1;
  return least(cols, m->block_cols - (m->col_origin + col) % m->block_cols);
}

/* The values of the source at row `row`, columns col .. col + cols; `r`: that row in s. */
INLINE void source_values(const kt_matrix *m, stored s, int64_t r, int64_t row, int64_t col,
                          const int cols, float *out) {
  const uint8_t *const from = stored_on(s, r, 0).data;
  const int64_t step = s.col_stride * s.unit.bytes;
  switch (m->dtype) {
#define VALUES(dtype, name, size, high, wide)                                                      \
  case dtype: name##_values(from, step, row, cols, out); break;
    AUDIT_DTYPES(VALUES)
  }
  if (m->block_scale)
    for (int64_t c = 0, run; c < cols; c += run) {
      const int64_t at = grid_at(m, row, col + c);
      const float scale = m->block_scale[at], zero = m->zero_point ? m->zero_point[at] : 0.0f;
      run = block_run(m, col + c, cols - c);
      for (int64_t i = c; i < c + run; i++) out[i] = (out[i] - zero) * scale;
    }
  if (m->round_to_bf16)
    for (int c = 0; c < cols; c++) out[c] = to_bf16(out[c]);
}

#endif
