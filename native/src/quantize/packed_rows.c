/* The scalar truth of the packed formats: matrices [rows, cols], one row at a time. What
 * differs between formats is in their kt_packer. */
#include "packed.h"
#include "rounding.h"

/* Rows are decoded some at a time, for sources whose rows lie next to each other. The codes
 * of one row fit behind them in the scratch, which has room for KT_STRIP_ROWS rows. */
enum { ROWS = 8 };

/* Decodes rows from n on, ROWS at most; how many. */
static int64_t decode_rows(const kt_matrix *m, int64_t n, float *scratch) {
  const int64_t count = m->rows - n < ROWS ? m->rows - n : ROWS;
  kt_decode_rows_scalar(m, n, count, scratch, kt_scratch_stride(m->cols));
  return count;
}

static kt_status quantize_row(const kt_packer *packer, const float *row, int64_t cols,
                              int8_t *codes, float *scale) {
  const uint32_t max = kt_row_max_bits(row, cols);
  if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
  *scale = packer->scale(kt_float(max));
  kt_round_row(row, cols, kt_reciprocal(*scale), codes);
  if (packer->requantize_to_int4) packer->requantize_to_int4(codes, cols);
  return KT_OK;
}

kt_status kt_quantize_rows(const kt_packer *packer, const kt_matrix *m, int8_t *codes, float *scale,
                           float *scratch) {
  for (int64_t n = 0, count; n < m->rows; n += count) {
    count = decode_rows(m, n, scratch);
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
  int8_t *const codes = (int8_t *)(scratch + ROWS * kt_scratch_stride(m->cols));
  for (int64_t n = 0, count; n < m->rows; n += count) {
    count = decode_rows(m, n, scratch);
    for (int64_t r = 0; r < count; r++) {
      const float *row = scratch + r * kt_scratch_stride(m->cols);
      const kt_status status = quantize_row(packer, row, m->cols, codes, scale + n + r);
      if (status) return status;
      packer->pack_row(codes, m->rows, m->cols, n + r, packed);
    }
  }
  return KT_OK;
}
