/* matrix.h - source matrices: checking, and decoding rows to binary32. */
#ifndef KT_MATRIX_H
#define KT_MATRIX_H

#include "ktconv.h"

enum { KT_STRIP_ROWS = 16 }; /* rows that are quantized together */

/* Arguments that every family needs: pointers, sizes, strides, dtype, scales. */
kt_status kt_matrix_check(const kt_matrix *matrix);

/* Bytes per stored element. */
static inline int64_t kt_dtype_size(int dtype) {
  return dtype == KT_F32 ? 4 : dtype == KT_F8_E4M3 ? 1 : 2;
}

/* The row of the block-scale grid for row n, and the first column after k under another
 * scale (or the end of the row). */
static inline const float *kt_scale_row(const kt_matrix *m, int64_t n) {
  return m->block_scale + (m->row_origin + n) / m->block_rows * m->scale_stride;
}

static inline int64_t kt_scale_block_end(const kt_matrix *m, int64_t k) {
  const int64_t end = ((m->col_origin + k) / m->block_cols + 1) * m->block_cols - m->col_origin;
  return end < m->cols ? end : m->cols;
}

/* Floats from one row of a decoded strip to the next: not `cols`, which is mostly a multiple
 * of 4096 bytes, so that rows would fight for the same cache lines. */
static inline int64_t kt_scratch_stride(int64_t cols) { return cols + 16; }

/* Decodes `count` rows from `row` into out; `stride` floats from one row to the next. */
typedef void kt_decode_rows_fn(const kt_matrix *matrix, int64_t row, int64_t count, float *out,
                               int64_t stride);
kt_decode_rows_fn kt_decode_rows_scalar, kt_decode_rows_avx2, kt_decode_rows_avx512;

/* The first NaN or Inf in row order, if there is one: KT_ERR_NONFINITE, else KT_OK.
 * `scratch` holds one row. */
kt_status kt_matrix_find_nonfinite(const kt_matrix *matrix, float *scratch, kt_position *bad);

#endif
