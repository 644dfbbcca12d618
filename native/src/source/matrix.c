#include "matrix.h"

#include "../cpu.h"
#include "../simd/float_mode.h"

#include <string.h>

size_t kt_scratch_size(int64_t cols) {
  return cols > 0 ? (size_t)kt_scratch_stride(cols) * KT_STRIP_ROWS * sizeof(float) : 0;
}

kt_status kt_matrix_check(const kt_matrix *m) {
  if (!m || !m->data || m->rows <= 0 || m->cols <= 0) return KT_ERR_ARGUMENT;
  if (m->dtype < KT_BF16 || m->dtype > KT_F8_E4M3) return KT_ERR_ARGUMENT;
  if (m->row_stride < 1 || m->col_stride < 1) return KT_ERR_STRIDE;
  if (m->row_stride != 1 && m->col_stride != 1) return KT_ERR_STRIDE;
  if ((m->dtype == KT_F8_E4M3) != (m->block_scale != NULL)) return KT_ERR_SCALE;
  if (m->block_scale && (m->block_rows < 1 || m->block_cols < 1 || m->scale_stride < 1 ||
                         m->row_origin < 0 || m->col_origin < 0))
    return KT_ERR_SCALE;
  return KT_OK;
}

kt_status kt_matrix_find_nonfinite(const kt_matrix *m, float *scratch, kt_position *bad) {
  for (int64_t row = 0; row < m->rows; row++) {
    kt_decode_rows_scalar(m, row, 1, scratch, m->cols);
    for (int64_t col = 0; col < m->cols; col++) {
      uint32_t bits;
      memcpy(&bits, &scratch[col], sizeof bits);
      if ((bits & 0x7f800000u) != 0x7f800000u) continue;
      if (bad) *bad = (kt_position){row, col};
      return KT_ERR_NONFINITE;
    }
  }
  return KT_OK;
}

static kt_decode_rows_fn *const decoders[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_decode_rows_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_decode_rows_avx2,
    [KT_ISA_AVX512] = kt_decode_rows_avx512,
#endif
};

kt_status kt_decode(const kt_matrix *matrix, float *out) {
  const kt_status status = kt_matrix_check(matrix);
  if (status) return status;
  if (!out) return KT_ERR_ARGUMENT;
  const uint64_t mode = kt_float_mode_enter();
  KT_CELL(decoders)(matrix, 0, matrix->rows, out, matrix->cols);
  kt_float_mode_leave(mode);
  return KT_OK;
}
