/* The truth of INT8: matrices [rows, cols], one row at a time. */
#include "../common/rounding.h"
#include "int8.h"

float kt_int8_scale(float amax) {
  const uint32_t reciprocal_of_127 = 0x3c010204u; /* fl32(1/127) */
  return kt_flush(kt_flush(amax) * kt_float(reciprocal_of_127));
}

/* Decodes row n into scratch and quantizes it. */
static kt_status quantize_row(const kt_matrix *m, int64_t n, int8_t *codes, float *scale,
                              float *scratch) {
  kt_decode_rows_scalar(m, n, 1, scratch, m->cols);
  const uint32_t max = kt_row_max_bits(scratch, m->cols);
  if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
  *scale = kt_int8_scale(kt_float(max));
  kt_round_row(scratch, m->cols, kt_reciprocal(*scale), codes);
  return KT_OK;
}

kt_status kt_int8_quantize_scalar(const kt_matrix *m, int8_t *codes, float *scale, float *scratch) {
  for (int64_t n = 0; n < m->rows; n++) {
    const kt_status status = quantize_row(m, n, codes + n * m->cols, scale + n, scratch);
    if (status) return status;
  }
  return KT_OK;
}

/* Where group 0 of row n is in the tile that starts at column k. */
static int64_t row_at(int64_t rows, int64_t cols, int64_t n, int64_t k) {
  return kt_tile_start(rows, cols, KT_INT8_BLOCK_ROWS, n, k) + kt_half_tile(n) + n % 16 * 4;
}

static void pack_row(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  for (int64_t k = 0; k < cols; k += KT_INT8_TILE_COLS) {
    uint8_t *const to = packed + row_at(rows, cols, n, k);
    for (int g = 0; g < 16; g++) memcpy(to + g * KT_GROUP_STRIDE, codes + k + 4 * g, 4);
  }
}

void kt_int8_pack_scalar(const int8_t *codes, int64_t rows, int64_t cols, uint8_t *packed) {
  for (int64_t n = 0; n < rows; n++) pack_row(codes + n * cols, rows, cols, n, packed);
}

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       int8_t *codes) {
  for (int64_t k = 0; k < cols; k += KT_INT8_TILE_COLS) {
    const uint8_t *const from = packed + row_at(rows, cols, n, k);
    for (int g = 0; g < 16; g++) memcpy(codes + k + 4 * g, from + g * KT_GROUP_STRIDE, 4);
  }
}

void kt_int8_unpack_scalar(const uint8_t *packed, int64_t rows, int64_t cols, int8_t *codes) {
  for (int64_t n = 0; n < rows; n++) unpack_row(packed, rows, cols, n, codes + n * cols);
}

kt_status kt_int8_quantize_pack_scalar(const kt_matrix *m, uint8_t *packed, float *scale,
                                       float *scratch) {
  int8_t *const codes = (int8_t *)(scratch + m->cols);
  for (int64_t n = 0; n < m->rows; n++) {
    const kt_status status = quantize_row(m, n, codes, scale + n, scratch);
    if (status) return status;
    pack_row(codes, m->rows, m->cols, n, packed);
  }
  return KT_OK;
}

void kt_int8_measure_rows_scalar(const kt_matrix *m, int64_t row, int64_t count,
                                 const uint8_t *packed, const float *scale, float *scratch,
                                 kt_error *error) {
  int8_t *const codes = (int8_t *)(scratch + m->cols);
  for (int64_t n = row; n < row + count; n++) {
    kt_decode_rows_scalar(m, n, 1, scratch, m->cols);
    unpack_row(packed, m->rows, m->cols, n, codes);
    const float computed = kt_int8_scale(kt_float(kt_row_max_bits(scratch, m->cols)));
    error->invalid += !kt_scale_ok(scale[n], computed);
    kt_add_row_error(scratch, codes, m->cols, (double)scale[n], -KT_INT8_MAX, n, error);
  }
}

void kt_int8_measure_scalar(const kt_matrix *m, const uint8_t *packed, const float *scale,
                            float *scratch, kt_error *error) {
  kt_int8_measure_rows_scalar(m, 0, m->rows, packed, scale, scratch, error);
}
