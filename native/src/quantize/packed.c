/* Public entry points of the packed formats: check, pick format and level, call. */
#include "packed.h"

#include "../simd/float_mode.h"

static const kt_packer *find_packer(int format) {
  switch (format) {
  case KT_INT8: return &kt_int8_packer;
  case KT_INT4: return &kt_int4_packer;
  default: return NULL;
  }
}

static kt_status check_shape(const kt_packer *packer, int64_t rows, int64_t cols) {
  if (!packer || rows <= 0 || cols <= 0) return KT_ERR_ARGUMENT;
  /* More than any memory holds; below it no size in bytes overflows. */
  if (cols > INT64_MAX / (int64_t)kt_scratch_size(1) / rows) return KT_ERR_SHAPE;
  return rows % packer->rows_step || cols % packer->cols_step ? KT_ERR_SHAPE : KT_OK;
}

static kt_status check_matrix(const kt_packer *packer, const kt_matrix *m, const void *scratch,
                              size_t scratch_size) {
  kt_status status = kt_matrix_check(m);
  if (!status) status = check_shape(packer, m->rows, m->cols);
  if (!status && (!scratch || scratch_size < kt_scratch_size(m->cols))) status = KT_ERR_SCRATCH;
  return status;
}

size_t kt_packed_size(int format, int64_t rows, int64_t cols) {
  const kt_packer *packer = find_packer(format);
  if (check_shape(packer, rows, cols)) return 0;
  return (size_t)rows * (size_t)cols / (size_t)packer->codes_per_byte;
}

kt_status kt_quantize(int format, const kt_matrix *matrix, int8_t *codes, float *scale,
                      void *scratch, size_t scratch_size, kt_position *bad) {
  const kt_packer *packer = find_packer(format);
  kt_status status = check_matrix(packer, matrix, scratch, scratch_size);
  if (status) return status;
  if (!codes || !scale) return KT_ERR_ARGUMENT;
  const uint64_t mode = kt_float_mode_enter();
  status = kt_quantize_rows(packer, matrix, codes, scale, scratch);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}

kt_status kt_pack(int format, const int8_t *codes, int64_t rows, int64_t cols, uint8_t *packed) {
  const kt_packer *packer = find_packer(format);
  if (!codes || !packed) return KT_ERR_ARGUMENT;
  const kt_status status = check_shape(packer, rows, cols);
  if (status) return status;
  for (int64_t n = 0; n < rows; n++) packer->pack_row(codes + n * cols, rows, cols, n, packed);
  return KT_OK;
}

kt_status kt_unpack(int format, const uint8_t *packed, int64_t rows, int64_t cols, int8_t *codes) {
  const kt_packer *packer = find_packer(format);
  if (!codes || !packed) return KT_ERR_ARGUMENT;
  const kt_status status = check_shape(packer, rows, cols);
  if (status) return status;
  for (int64_t n = 0; n < rows; n++) packer->unpack_row(packed, rows, cols, n, codes + n * cols);
  return KT_OK;
}

kt_status kt_quantize_pack(int format, const kt_matrix *matrix, uint8_t *packed, float *scale,
                           void *scratch, size_t scratch_size, kt_position *bad) {
  const kt_packer *packer = find_packer(format);
  kt_status status = check_matrix(packer, matrix, scratch, scratch_size);
  if (status) return status;
  if (!packed || !scale) return KT_ERR_ARGUMENT;
  const uint64_t mode = kt_float_mode_enter();
  status = KT_CELL(packer->quantize_pack)(packer, matrix, packed, scale, scratch);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}
