/* The scalar truth of the packed formats: matrices [rows, cols], one row at a time. What
 * differs between formats is in their kt_packer. */
#include "common/rounding.h"
#include "packed.h"

/* Rows are decoded some at a time, for sources whose rows lie next to each other. The codes
 * of one row fit behind them in the scratch, which has room for KT_STRIP_ROWS rows. */
enum { ROWS = 8 };

static int8_t *codes_in(float *scratch, int64_t cols) {
  return (int8_t *)(scratch + ROWS * kt_scratch_stride(cols));
}

/* Decodes rows from n on, ROWS at most; how many. */
static int64_t decode_rows(const kt_matrix *m, int64_t n, int64_t end, float *scratch) {
  const int64_t count = end - n < ROWS ? end - n : ROWS;
  kt_decode_rows_scalar(m, n, count, scratch, kt_scratch_stride(m->cols));
  return count;
}

static kt_status quantize_row(const kt_packer *packer, const float *row, int64_t cols,
                              int8_t *codes, float *scale) {
  const uint32_t max = kt_row_max_bits(row, cols);
  if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
  *scale = packer->scale(kt_float(max));
  kt_round_row(row, cols, kt_reciprocal(*scale), codes);
  if (packer->round_again) packer->round_again(codes, cols);
  return KT_OK;
}

kt_status kt_quantize_rows(const kt_packer *packer, const kt_matrix *m, int8_t *codes, float *scale,
                           float *scratch) {
  for (int64_t n = 0, count; n < m->rows; n += count) {
    count = decode_rows(m, n, m->rows, scratch);
    for (int64_t r = 0; r < count; r++) {
      const float *row = scratch + r * kt_scratch_stride(m->cols);
      const kt_status status =
          quantize_row(packer, row, m->cols, codes + (n + r) * m->cols, scale + n + r);
      if (status) return status;
    }
  }
  return KT_OK;
}

kt_status kt_quantize_pack_rows(const kt_packer *packer, const kt_matrix *m, uint8_t *packed,
                                float *scale, float *scratch) {
  int8_t *const codes = codes_in(scratch, m->cols);
  for (int64_t n = 0, count; n < m->rows; n += count) {
    count = decode_rows(m, n, m->rows, scratch);
    for (int64_t r = 0; r < count; r++) {
      const float *row = scratch + r * kt_scratch_stride(m->cols);
      const kt_status status = quantize_row(packer, row, m->cols, codes, scale + n + r);
      if (status) return status;
      packer->pack_row(codes, m->rows, m->cols, n + r, packed);
    }
  }
  return KT_OK;
}

/* Adds row n to an error: its source values, codes, and the step between two codes. Sums
 * run in binary64, in eight lanes that compilers vectorise. Denormal sources count as the
 * zeros they are to the format; else they could be off by a whole step of a tiny row. */
static void add_row_error(const float *source, const int8_t *codes, int64_t cols, double step,
                          int lowest, int64_t n, kt_error *error) {
  enum { LANES = 8 }; /* divides every format's cols_step */
  double squared_error[LANES] = {0}, squared_source[LANES] = {0}, max[LANES] = {0};
  int64_t zeros = 0, invalid = 0;
  for (int64_t k = 0; k < cols; k += LANES)
    for (int i = 0; i < LANES; i++) {
      const double value = (double)kt_flush(source[k + i]);
      const double difference = value - codes[k + i] * step;
      const double magnitude = difference < 0 ? -difference : difference;
      squared_error[i] += difference * difference;
      squared_source[i] += value * value;
      max[i] = magnitude > max[i] ? magnitude : max[i];
    }
  for (int64_t k = 0; k < cols; k++) {
    zeros += codes[k] == 0;
    invalid += codes[k] < lowest;
  }
  error->zeros += zeros;
  error->invalid += invalid + (step > 0 ? 0 : cols - zeros);
  for (int i = 0; i < LANES; i++) {
    error->sum_squared_error += squared_error[i];
    error->sum_squared_source += squared_source[i];
    if (step > 0 && max[i] / step > error->max_steps) {
      error->max_steps = max[i] / step;
      error->worst_row = n;
    }
  }
}

void kt_measure_rows(const kt_packer *packer, const kt_matrix *m, int64_t row, int64_t count,
                     const uint8_t *packed, const float *scale, float *scratch, kt_error *error) {
  int8_t *const codes = codes_in(scratch, m->cols);
  for (int64_t n = row, decoded; n < row + count; n += decoded) {
    decoded = decode_rows(m, n, row + count, scratch);
    for (int64_t r = n; r < n + decoded; r++) {
      const float *source = scratch + (r - n) * kt_scratch_stride(m->cols);
      packer->unpack_row(packed, m->rows, m->cols, r, codes);
      const float computed = packer->scale(kt_float(kt_row_max_bits(source, m->cols)));
      error->invalid += !kt_scale_ok(scale[r], computed);
      const double step = (double)scale[r] * (double)packer->step;
      add_row_error(source, codes, m->cols, step, packer->lowest, r, error);
    }
  }
}
