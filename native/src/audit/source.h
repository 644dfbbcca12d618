/* source.h - values of the source as the audit reads them: from the definition of their
 * number formats, not from source/. */
#ifndef KT_AUDIT_SOURCE_H
#define KT_AUDIT_SOURCE_H

#include "source_ggml.h"
#include "source_numbers.h"

/* ---- Numbers of some columns of a row ---------------------------------------- */

/* <name>_values: the numbers in the units from `from` on, which hold row `row` of the matrix;
 * `cols` is a multiple of 32, KT_AUDIT_BLOCK at most. */

INLINE uint16_t half_at(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return half;
}

INLINE void bf16_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  (void)row;
  for (int64_t c = 0; c < cols; c++) out[c] = from_bits((uint32_t)half_at(from + 2 * c) << 16);
}

INLINE void f16_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  (void)row;
  for (int64_t c = 0; c < cols; c++) out[c] = f16_value(half_at(from + 2 * c));
}

INLINE void f32_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  (void)row;
  memcpy(out, from, (size_t)cols * sizeof *out);
}

INLINE void f8_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  (void)row;
  for (int64_t c = 0; c < cols; c++) out[c] = f8_value(from[c]);
}

/* The numbers of 4 bits in some bytes, the low ones first. */
INLINE void halves_of_bytes(const uint8_t *bytes, int64_t cols, uint8_t *number) {
  for (int64_t c = 0; c < cols / 2; c++) {
    number[2 * c] = bytes[c] & 15;
    number[2 * c + 1] = bytes[c] >> 4;
  }
}

#define NIBBLE_VALUES(name)                                                                        \
  INLINE void name##_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {          \
    uint8_t nibble[KT_AUDIT_BLOCK];                                                                \
    (void)row;                                                                                     \
    halves_of_bytes(from, cols, nibble);                                                           \
    for (int64_t c = 0; c < cols; c++) out[c] = name##_value(nibble[c]);                           \
  }

/* In two loops, the first of which is made of bytes alone. */
INLINE void f4_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  uint8_t nibble[KT_AUDIT_BLOCK];
  int8_t halves[KT_AUDIT_BLOCK];
  (void)row;
  halves_of_bytes(from, cols, nibble);
  for (int64_t c = 0; c < cols; c++) halves[c] = f4_halves(nibble[c]);
  for (int64_t c = 0; c < cols; c++) out[c] = (float)halves[c] * 0.5f;
}

NIBBLE_VALUES(quarters)
NIBBLE_VALUES(i4)

INLINE uint32_t word_of(const uint8_t *at) {
  return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

INLINE void i8_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  (void)row;
  for (int64_t c = 0; c < cols; c++) out[c] = (float)(int8_t)from[c];
}

/* A stream of `width` bits each: every `width` bytes have 8 numbers. */
INLINE void stream_numbers(const uint8_t *from, const int width, int64_t cols, uint8_t *number) {
  if (width == 4) halves_of_bytes(from, cols, number);
  for (int64_t c = 0; c < cols && width != 4; c += 8) {
    uint64_t eight = 0;
    for (int i = 0; i < width; i++) eight |= (uint64_t)from[c * width / 8 + i] << 8 * i;
    for (int i = 0; i < 8; i++) number[c + i] = (uint8_t)(eight >> width * i & ((1u << width) - 1));
  }
}

INLINE void stream_values(const uint8_t *from, const int width, int64_t cols, float *out) {
  uint8_t unpacked[KT_AUDIT_BLOCK];
  const uint8_t *const number = width == 8 ? from : unpacked;
  if (width != 8) stream_numbers(from, width, cols, unpacked);
  for (int64_t c = 0; c < cols; c++) out[c] = (float)number[c];
}

INLINE void f6_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  uint8_t code[KT_AUDIT_BLOCK];
  (void)row;
  stream_numbers(from, 6, cols, code);
  for (int64_t c = 0; c < cols; c++) out[c] = f6_value(code[c]);
}

#define STREAM_VALUES(width)                                                                       \
  INLINE void u##width##_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {      \
    (void)row;                                                                                     \
    stream_values(from, width, cols, out);                                                         \
  }

STREAM_VALUES(2)
STREAM_VALUES(3)
STREAM_VALUES(4)
STREAM_VALUES(5)
STREAM_VALUES(6)
STREAM_VALUES(7)
STREAM_VALUES(8)

/* Even rows are in the lower half of the word, odd ones in the upper. */
INLINE void u4_awq_values(const uint8_t *from, int64_t row, int64_t cols, float *out) {
  const int shift = (int)(row % 8 / 2 * 4 + row % 2 * 16);
  for (int64_t c = 0; c < cols; c++) out[c] = (float)(word_of(from + 4 * c) >> shift & 15);
}

/* Of each dtype: its name here, and a unit in bytes, rows and columns. */
#define AUDIT_DTYPES(each)                                                                         \
  each(KT_BF16, bf16, 2, 1, 1) each(KT_F16, f16, 2, 1, 1) each(KT_F32, f32, 4, 1, 1)               \
      each(KT_F8_E4M3, f8, 1, 1, 1) each(KT_F4_E2M1, f4, 1, 1, 2) each(KT_U4, u4, 4, 1, 8)         \
          each(KT_U4_AWQ, u4_awq, 4, 8, 1) each(KT_I8, i8, 1, 1, 1) each(KT_U2, u2, 4, 1, 16)      \
              each(KT_U3, u3, 12, 1, 32) each(KT_U5, u5, 20, 1, 32) each(KT_U6, u6, 12, 1, 16)     \
                  each(KT_U7, u7, 28, 1, 32) each(KT_U8, u8, 4, 1, 4) each(KT_I4, i4, 1, 1, 2)     \
                      each(KT_F4_E0M3, quarters, 1, 1, 2) each(KT_F6_E2M3, f6, 3, 1, 4)

/* The same of blocks of ggml. */
#define AUDIT_BLOCKS(each)                                                                         \
  each(KT_Q4_0, q4_0, 18, 1, 32) each(KT_Q4_1, q4_1, 20, 1, 32) each(KT_Q5_0, q5_0, 22, 1, 32)     \
      each(KT_Q5_1, q5_1, 24, 1, 32) each(KT_Q8_0, q8_0, 34, 1, 32)                                \
          each(KT_Q2_K, q2_k, 84, 1, 256) each(KT_Q3_K, q3_k, 110, 1, 256)                         \
              each(KT_Q4_K, q4_k, 144, 1, 256) each(KT_Q5_K, q5_k, 176, 1, 256)                    \
                  each(KT_Q6_K, q6_k, 210, 1, 256) each(KT_IQ4_NL, iq4_nl, 18, 1, 32)              \
                      each(KT_IQ4_XS, iq4_xs, 136, 1, 256) each(KT_MXFP4, mxfp4, 17, 1, 32)        \
                          each(KT_NVFP4, nvfp4, 36, 1, 64) each(KT_TQ1_0, tq1_0, 54, 1, 256)       \
                              each(KT_TQ2_0, tq2_0, 66, 1, 256) each(KT_Q1_0, q1_0, 18, 1, 128)    \
                                  each(KT_Q2_0, q2_0, 18, 1, 64)

typedef struct audit_unit {
  int32_t bytes, rows, cols;
} audit_unit;

static const audit_unit audit_units[KT_DTYPE_COUNT] = {
#define UNIT(dtype, name, bytes, rows, cols) [dtype] = {bytes, rows, cols},
    AUDIT_DTYPES(UNIT) AUDIT_BLOCKS(UNIT)
#undef UNIT
};

/* ---- Where they lie ---------------------------------------------------------- */

/* Units from a first row and column of the source on; strides in units. Those of a row lie side by
 * side, but for large blocks of ggml. */
typedef struct stored {
  audit_unit unit;
  const uint8_t *data;
  int64_t row_stride, col_stride;
  int64_t col; /* of that column in its unit: not 0 in blocks of ggml */
} stored;

/* Divisions take long, and most units are elements. */
INLINE int64_t units_in(int64_t elements, int64_t per_unit) {
  return per_unit == 1 ? elements : elements / per_unit;
}

/* `rows` rows further on: to the unit with that row. */
INLINE stored stored_on(stored s, int64_t rows) {
  s.data += units_in(rows, s.unit.rows) * s.row_stride * s.unit.bytes;
  return s;
}

/* Rows and columns are longer than what is read of them at once, which the hardware does not
 * expect. Past the end a prefetch does nothing. */
INLINE void prefetch(const uint8_t *from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)at), 0, 2);
}

/* A loop of stores to distant places: clang would take vectors apart for them. */
#if defined(__clang__)
#define SCALAR_LOOP _Pragma("clang loop vectorize(disable)")
#else
#define SCALAR_LOOP
#endif

INLINE void transpose(const uint8_t *from, int64_t step, const size_t size, int64_t rows,
                      int64_t cols, uint8_t *to, int64_t pitch) {
  enum { AHEAD = 32 }; /* columns */
  for (int64_t c = 0; c < cols; c++) {
    prefetch(from + (c + AHEAD) * step, rows * (int64_t)size);
    SCALAR_LOOP
    for (int64_t r = 0; r < rows; r++)
      memcpy(to + r * pitch + c * (int64_t)size, from + c * step + r * (int64_t)size, size);
  }
}

/* Whether a row of units of 32 columns at most has others between them. */
INLINE int is_across(const kt_matrix *m) {
  return m->col_stride != 1 && audit_units[m->dtype].cols <= KT_AUDIT_GROUP_COLS;
}

enum { ROOM_BYTES = 2 * KT_AUDIT_ROWS * (4 * KT_AUDIT_GATHERED + 128) };

/* `cols` columns from (row, col) on. If rows lie side by side, a copy of 32 of them: row after row
 * would read each line of memory once per row, and lines that are a power of two apart drive each
 * other out of the caches. */
INLINE stored stored_from(const kt_matrix *m, int64_t row, int64_t col, int64_t cols,
                          uint8_t room[ROOM_BYTES]) {
  const audit_unit unit = audit_units[m->dtype];
  const int64_t size = unit.bytes, units = units_in(m->first_col + col, unit.cols);
  const int64_t first = units_in(row, unit.rows) * m->row_stride + units * m->col_stride;
  const uint8_t *const data = (const uint8_t *)m->data + first * size;
  if (!is_across(m))
    return (stored){unit, data, m->row_stride, m->col_stride,
                    m->first_col + col - units * unit.cols};
  const int64_t rows = 2 * KT_AUDIT_ROWS / unit.rows, per_row = units_in(cols, unit.cols);
  const int64_t row_stride = per_row + 64 / size + 1; /* no power of two */
  const int64_t step = m->col_stride * size, pitch = row_stride * size;
  switch (size) { /* copies of constant size take one instruction */
  case 1: transpose(data, step, 1, rows, per_row, room, pitch); break;
  case 2: transpose(data, step, 2, rows, per_row, room, pitch); break;
  case 4: transpose(data, step, 4, rows, per_row, room, pitch); break;
  case 12: transpose(data, step, 12, rows, per_row, room, pitch); break;
  default: transpose(data, step, (size_t)size, rows, per_row, room, pitch);
  }
  return (stored){unit, room, row_stride, 1, 0};
}

/* ---- Scales ------------------------------------------------------------------ */

INLINE void scale_run(float *out, int64_t cols, float zero, float scale) {
  for (int64_t i = 0; i < cols; i++) out[i] = (out[i] - zero) * scale;
}

/* E4M3 to values in one pass, where there are no zero points and groups are in order. */
INLINE void f8_scaled(const kt_matrix *m, const uint8_t *from, int64_t row, int64_t col,
                      int64_t cols, float *restrict out) {
  const int64_t line = (m->row_origin + row) / m->block_rows * m->scale_stride;
  int64_t x = (m->col_origin + col) / m->block_cols;
  int64_t end = (x + 1) * m->block_cols - m->col_origin - col;
  for (int64_t c = 0; c < cols; c = end, end += m->block_cols, x++) {
    const float scale = m->block_scale[line + x];
    const int64_t stop = least(end, cols);
    for (int64_t i = c; i < stop; i++) out[i] = f8_value(from[i]) * scale;
  }
}

/* Numbers of `cols` columns from `col` of row `row` to values. Divisions take long: one for all
 * blocks. */
INLINE void scale_values(const kt_matrix *m, int64_t row, int64_t col, int64_t cols, float *out) {
  const int64_t line = (m->row_origin + row) / m->block_rows * m->scale_stride;
  const float *const scales = m->block_scale + line;
  const float *const zeros = m->zero_point ? m->zero_point + line : NULL;
  if (m->group_of_col) {
    const int32_t *const group = m->group_of_col + col;
    for (int64_t c = 0; c < cols; c++)
      out[c] = (out[c] - (zeros ? zeros[group[c]] : 0.0f)) * scales[group[c]];
    return;
  }
  int64_t x = (m->col_origin + col) / m->block_cols;
  int64_t end = (x + 1) * m->block_cols - m->col_origin - col;
  for (int64_t c = 0; c < cols; c = end, end += m->block_cols, x++) {
    const float scale = scales[x], zero = zeros ? zeros[x] : 0.0f;
    if (end - c == 32 && end <= cols) /* a constant number of turns makes better vectors */
      scale_run(out + c, 32, zero, scale);
    else
      scale_run(out + c, least(end, cols) - c, zero, scale);
  }
}

INLINE int is_f8_scaled(const kt_matrix *m) {
  return m->dtype == KT_F8_E4M3 && m->block_scale && !m->zero_point && !m->group_of_col;
}

INLINE void stored_numbers(const kt_matrix *m, stored s, int64_t row, int64_t cols, float *out) {
  switch (m->dtype) {
#define VALUES(dtype, name, size, high, wide)                                                      \
  case dtype: name##_values(s.data, row, cols, out); break;
    AUDIT_DTYPES(VALUES)
#define COLUMNS(dtype, name, size, high, wide)                                                     \
  case dtype:                                                                                      \
    for (int64_t c = 0, at = s.col; c < cols; c += 32, at += 32)                                   \
      name##_columns(s.data + at / (wide) * s.col_stride * (size), (int)(at % (wide)), out + c);   \
    break;
    AUDIT_BLOCKS(COLUMNS)
  }
}

/* The values of the source at `cols` columns from `col` on of row `row`; s: from there on. A
 * function of its own: inlined into the comparison, compilers make worse of both. */
static __attribute__((noinline)) void source_values(const kt_matrix *m, stored s, int64_t row,
                                                    int64_t col, int64_t cols, float *out) {
  if (is_f8_scaled(m)) {
    f8_scaled(m, s.data, row, col, cols, out);
  } else {
    stored_numbers(m, s, row, cols, out);
    if (m->block_scale) scale_values(m, row, col, cols, out);
  }
  if (m->round_to_bf16)
    for (int64_t c = 0; c < cols; c++) out[c] = to_bf16(out[c]);
  for (int64_t c = 0; m->row_factor && c < cols; c++) out[c] *= m->row_factor[row];
  for (int64_t c = 0; m->col_factor && c < cols; c++) out[c] *= m->col_factor[col + c];
}

#endif
