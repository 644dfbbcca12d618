/* matrix.h - source matrices: what is known of each dtype, checking, and where scales lie. What
 * numbers mean is decode.h's. */
#ifndef KT_MATRIX_H
#define KT_MATRIX_H

#include "ktconv.h"

enum {
  KT_STRIP_ROWS = 16, /* rows that are quantized together */
  KT_ROOM_ROWS = 8,   /* of scratch, behind theirs: for integers of 16 bits of all of them */
  KT_CUT_COLS = 32    /* blocks of ggml are cut at multiples of so many columns */
};

/* How a dtype is stored: a row of the table in matrix.c. */
typedef struct kt_dtype_traits {
  kt_stored_unit unit;
  int32_t scaled; /* its numbers mean nothing without scales */
} kt_dtype_traits;

/* Whether its units are blocks of ggml. */
static inline int kt_is_ggml(int dtype) { return dtype >= KT_Q4_0 && dtype <= KT_Q2_0; }

/* NULL for a number that is no dtype. */
const kt_dtype_traits *kt_dtype_find(int dtype);

/* Arguments that every format needs: pointers, sizes, strides, dtype, scales. */
kt_status kt_matrix_check(const kt_matrix *matrix);

/* Where row n begins in a grid of scales or zero points. */
static inline int64_t kt_grid_row(const kt_matrix *m, int64_t n) {
  return (m->row_origin + n) / m->block_rows * m->scale_stride;
}

/* The column of the grid for column k. */
static inline int64_t kt_grid_col(const kt_matrix *m, int64_t k) {
  return m->group_of_col ? m->group_of_col[k] : (m->col_origin + k) / m->block_cols;
}

/* Columns begin..end-1 of a row, which have the same scale: the one in column `col` of the grid. */
typedef struct kt_grid_span {
  int64_t begin, end, col;
} kt_grid_span;

static inline kt_grid_span kt_grid_span_at(const kt_matrix *m, int64_t begin, int64_t end,
                                           int64_t col) {
  if (m->group_of_col && begin < m->cols) {
    col = m->group_of_col[begin];
    for (end = begin + 1; end < m->cols && m->group_of_col[end] == col;) end++;
  }
  return (kt_grid_span){begin, end < m->cols ? end : m->cols, col};
}

/* for (s = first; s.begin < cols; s = next): without the divisions that a lookup of each takes. */
static inline kt_grid_span kt_grid_first(const kt_matrix *m) {
  const int64_t col = m->col_origin / m->block_cols;
  return kt_grid_span_at(m, 0, (col + 1) * m->block_cols - m->col_origin, col);
}

static inline kt_grid_span kt_grid_next(const kt_matrix *m, kt_grid_span s) {
  return kt_grid_span_at(m, s.end, s.end + m->block_cols, s.col + 1);
}

/* Floats from one row of a decoded strip to the next: not `cols`, which is mostly a multiple
 * of 4096 bytes, so that rows would fight for the same cache lines. */
static inline int64_t kt_scratch_stride(int64_t cols) { return cols + 16; }

/* The first row of scratch behind those of a strip. */
static inline float *kt_scratch_row(float *scratch, int64_t cols) {
  return scratch + KT_STRIP_ROWS * kt_scratch_stride(cols);
}

#endif
