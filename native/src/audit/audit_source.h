/* audit_source.h - values of the source as the audit reads them: from the definition of their
 * number formats, not from source/. */
#ifndef KT_AUDIT_SOURCE_H
#define KT_AUDIT_SOURCE_H

#include "audit_ggml.h"
#include "audit_numbers.h"

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

INLINE uint16_t half_at(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return half;
}

INLINE void bf16_values(const uint8_t *from, int64_t step, int64_t row, const int cols,
                        float *out) {
  (void)row;
  if (step == 2)
    for (int c = 0; c < cols; c++) out[c] = from_bits((uint32_t)half_at(from + 2 * c) << 16);
  else
    for (int c = 0; c < cols; c++) out[c] = from_bits((uint32_t)half_at(from + step * c) << 16);
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

#define NIBBLE_VALUES(name)                                                                        \
  INLINE void name##_values(const uint8_t *from, int64_t step, int64_t row, const int cols,        \
                            float *out) {                                                          \
    uint8_t pair[KT_AUDIT_COLS / 2], nibble[KT_AUDIT_COLS];                                        \
    (void)row;                                                                                     \
    side_by_side(from, step, 1, cols / 2, pair);                                                   \
    for (int c = 0; c < cols / 2; c++) {                                                           \
      nibble[2 * c] = pair[c] & 15;                                                                \
      nibble[2 * c + 1] = pair[c] >> 4;                                                            \
    }                                                                                              \
    for (int c = 0; c < cols; c++) out[c] = name##_value(nibble[c]);                               \
  }

NIBBLE_VALUES(f4)
NIBBLE_VALUES(quarters)
NIBBLE_VALUES(i4)

INLINE uint32_t word_of(const uint8_t *at) {
  return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

INLINE void i8_values(const uint8_t *from, int64_t step, int64_t row, const int cols, float *out) {
  int8_t byte[KT_AUDIT_COLS];
  (void)row;
  side_by_side(from, step, 1, cols, byte);
  for (int c = 0; c < cols; c++) out[c] = (float)byte[c];
}

/* A stream of `width` bits each, in units of `size` bytes: every `width` bytes have 8 numbers. */
INLINE void stream_values(const uint8_t *from, int64_t step, int64_t size, int width,
                          const int cols, float *out) {
  uint8_t bytes[KT_AUDIT_COLS], number[KT_AUDIT_COLS];
  side_by_side(from, step, size, cols * width / 8 / size, bytes);
  for (int c = 0; c < cols; c += 8) {
    uint64_t eight = 0;
    for (int i = 0; i < width; i++) eight |= (uint64_t)bytes[c * width / 8 + i] << 8 * i;
    for (int i = 0; i < 8; i++) number[c + i] = (uint8_t)(eight >> width * i & ((1u << width) - 1));
  }
  for (int c = 0; c < cols; c++) out[c] = (float)number[c];
}

#define STREAM_VALUES(width, size)                                                                 \
  INLINE void u##width##_values(const uint8_t *from, int64_t step, int64_t row, const int cols,    \
                                float *out) {                                                      \
    (void)row;                                                                                     \
    stream_values(from, step, size, width, cols, out);                                             \
  }

STREAM_VALUES(2, 4)
STREAM_VALUES(3, 12)
STREAM_VALUES(4, 4)
STREAM_VALUES(5, 20)
STREAM_VALUES(6, 12)
STREAM_VALUES(7, 28)
STREAM_VALUES(8, 4)

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
          each(KT_U4_AWQ, u4_awq, 4, 8, 1) each(KT_I8, i8, 1, 1, 1) each(KT_U2, u2, 4, 1, 16)      \
              each(KT_U3, u3, 12, 1, 32) each(KT_U5, u5, 20, 1, 32) each(KT_U6, u6, 12, 1, 16)     \
                  each(KT_U7, u7, 28, 1, 32) each(KT_U8, u8, 4, 1, 4) each(KT_I4, i4, 1, 1, 2)     \
                      each(KT_F4_E0M3, quarters, 1, 1, 2)

/* The same of blocks of ggml. */
#define AUDIT_BLOCKS(each)                                                                         \
  each(KT_Q4_0, q4_0, 18, 1, 32) each(KT_Q4_1, q4_1, 20, 1, 32) each(KT_Q5_0, q5_0, 22, 1, 32)     \
      each(KT_Q5_1, q5_1, 24, 1, 32) each(KT_Q8_0, q8_0, 34, 1, 32)                                \
          each(KT_Q2_K, q2_k, 84, 1, 256) each(KT_Q3_K, q3_k, 110, 1, 256)                         \
              each(KT_Q4_K, q4_k, 144, 1, 256) each(KT_Q5_K, q5_k, 176, 1, 256)                    \
                  each(KT_Q6_K, q6_k, 210, 1, 256) each(KT_IQ4_NL, iq4_nl, 18, 1, 32)              \
                      each(KT_IQ4_XS, iq4_xs, 136, 1, 256) each(KT_MXFP4, mxfp4, 17, 1, 32)        \
                          each(KT_NVFP4, nvfp4, 36, 1, 64) each(KT_TQ1_0, tq1_0, 54, 1, 256)       \
                              each(KT_TQ2_0, tq2_0, 66, 1, 256)

typedef struct audit_unit {
  int32_t bytes, rows, cols;
} audit_unit;

static const audit_unit audit_units[KT_DTYPE_COUNT] = {
#define UNIT(dtype, name, bytes, rows, cols) [dtype] = {bytes, rows, cols},
    AUDIT_DTYPES(UNIT) AUDIT_BLOCKS(UNIT)
#undef UNIT
};

/* ---- Where they lie ---------------------------------------------------------- */

/* Units from a first row and column of the source on; strides in units. */
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

/* `rows` rows and `cols` columns further on: to the unit with that element. */
INLINE stored stored_on(stored s, int64_t rows, int64_t cols) {
  const int64_t units = units_in(s.col + cols, s.unit.cols);
  const int64_t at = units_in(rows, s.unit.rows) * s.row_stride + units * s.col_stride;
  s.col += cols - units * s.unit.cols;
  s.data += at * s.unit.bytes;
  return s;
}

INLINE stored stored_from(const kt_matrix *m, int64_t row, int64_t col) {
  const stored whole = {audit_units[m->dtype], m->data, m->row_stride, m->col_stride, m->first_col};
  return stored_on(whole, row, col);
}

/* A copy of the columns of 32 rows that lie side by side: row after row would read each line of
 * memory once per row, and lines that are a power of two apart drive each other out of the caches.
 */
INLINE stored gathered(stored s, int64_t cols, uint8_t *room) {
  const int64_t run = 2 * KT_AUDIT_ROWS / s.unit.rows, size = s.unit.bytes;
  for (int64_t c = 0; c < cols / s.unit.cols; c++)
    memcpy(room + c * run * size, s.data + size * c * s.col_stride, (size_t)(run * size));
  return (stored){s.unit, room, 1, run, 0};
}

/* ---- Scales ------------------------------------------------------------------ */

INLINE void scaled_run(float *out, int64_t cols, float zero, float scale) {
  for (int64_t i = 0; i < cols; i++) out[i] = (out[i] - zero) * scale;
}

/* Scales of `cols` columns from `col` of row `row`. Divisions take long: one for all blocks. */
INLINE void scaled_values(const kt_matrix *m, int64_t row, int64_t col, const int cols,
                          float *out) {
  const int64_t line = (m->row_origin + row) / m->block_rows * m->scale_stride;
  const float *const scales = m->block_scale + line;
  const float *const zeros = m->zero_point ? m->zero_point + line : NULL;
  if (m->group_of_col) {
    const int32_t *const group = m->group_of_col + col;
    for (int c = 0; c < cols; c++)
      out[c] = (out[c] - (zeros ? zeros[group[c]] : 0.0f)) * scales[group[c]];
    return;
  }
  int64_t x = (m->col_origin + col) / m->block_cols;
  int64_t end = (x + 1) * m->block_cols - m->col_origin - col;
  for (int64_t c = 0; c < cols; c = end, end += m->block_cols, x++) {
    const float scale = scales[x], zero = zeros ? zeros[x] : 0.0f;
    if (end >= cols && c == 0) /* constant numbers of turns make vectors */
      scaled_run(out, cols, zero, scale);
    else if (end - c == 32 && end <= cols)
      scaled_run(out + c, 32, zero, scale);
    else
      scaled_run(out + c, least(end, cols) - c, zero, scale);
  }
}

/* The values of the source at `rows` rows from `row` on, columns col .. col + cols; s: from there
 * on. One switch and one loop for all rows: of one row it would take as long as the values. */
INLINE void source_values(const kt_matrix *m, const stored *s, const int rows, int64_t row,
                          int64_t col, const int cols, float (*out)[KT_AUDIT_COLS]) {
  const int64_t step = s->col_stride * s->unit.bytes;
  switch (m->dtype) {
#define VALUES(dtype, name, size, high, wide)                                                      \
  case dtype:                                                                                      \
    for (int r = 0; r < rows; r++)                                                                 \
      name##_values(s->data + r / (high) * s->row_stride * (size), step, row + r, cols, out[r]);   \
    break;
    AUDIT_DTYPES(VALUES)
#define COLUMNS(dtype, name, size, high, wide)                                                     \
  case dtype:                                                                                      \
    for (int r = 0; r < rows; r++) {                                                               \
      const uint8_t *b = s->data + r * s->row_stride * (size);                                     \
      int first = (int)s->col;                                                                     \
      for (int c = 0; c < cols; c += 32) {                                                         \
        name##_columns(b, first, out[r] + c);                                                      \
        first += 32;                                                                               \
        if (first == (wide)) first = 0, b += step;                                                 \
      }                                                                                            \
    }                                                                                              \
    break;
    AUDIT_BLOCKS(COLUMNS)
  }
  if (m->block_scale)
    for (int r = 0; r < rows; r++) scaled_values(m, row + r, col, cols, out[r]);
  if (m->round_to_bf16)
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++) out[r][c] = to_bf16(out[r][c]);
}

/* Functions of their own: inlined into the comparisons, compilers make worse of both. */
static __attribute__((noinline)) void values_of_half_tile(const kt_matrix *m, const stored *s,
                                                          int64_t row, int64_t col,
                                                          float (*out)[KT_AUDIT_COLS]) {
  source_values(m, s, KT_AUDIT_ROWS, row, col, KT_AUDIT_COLS, out);
}

static __attribute__((noinline)) void values_of_group_tile(const kt_matrix *m, const stored *s,
                                                           int64_t row, int64_t col,
                                                           float (*out)[KT_AUDIT_COLS]) {
  source_values(m, s, KT_AUDIT_ROWS, row, col, KT_AUDIT_GROUP_COLS, out);
}

#endif
