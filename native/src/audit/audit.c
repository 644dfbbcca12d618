/* Public entry points of the audit: check, pick the level, call. */
#include "audit.h"

#include "../cpu.h"
#include "../simd/float_mode.h"
#include "../source/matrix.h"

/* The shape rules of docs/formats.md, once more. */
static kt_status check_packed(int format, int64_t rows, int64_t cols) {
  if ((format != KT_INT8 && format != KT_INT4) || rows < 1 || cols < 1) return KT_ERR_ARGUMENT;
  if (cols > INT64_MAX / 8 / rows) return KT_ERR_SHAPE;
  return rows % 32 || cols % (format == KT_INT4 ? 128 : 64) ? KT_ERR_SHAPE : KT_OK;
}

static kt_audit_fn *const audits[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_audit_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_audit_avx2,
    [KT_ISA_AVX512] = kt_audit_avx512,
#endif
};

kt_status kt_audit_run(int format, const kt_matrix *source, int64_t rows, int64_t first,
                       const uint8_t *packed, const float *scale, float *row_error, float *row_amax,
                       float *row_scale, kt_audit *audit) {
  if (!packed || !scale || !row_error || !row_amax || !row_scale || !audit) return KT_ERR_ARGUMENT;
  kt_status status = kt_matrix_check(source);
  if (!status) status = check_packed(format, rows, source->cols);
  if (status) return status;
  if (source->rows % 32 || first % 32 || first < 0 || first > rows - source->rows)
    return KT_ERR_SHAPE;
  *audit = (kt_audit){0};
  const kt_audit_job job = {.int4 = format == KT_INT4,
                            .source = source,
                            .rows = rows,
                            .first = first,
                            .packed = packed,
                            .scale = scale,
                            .row_error = row_error,
                            .row_amax = row_amax,
                            .row_scale = row_scale};
  const uint64_t mode = kt_float_mode_enter();
  KT_CELL(audits)(&job, audit);
  kt_float_mode_leave(mode);
  return KT_OK;
}

kt_status kt_audit_codes(int format, const uint8_t *packed, int64_t rows, int64_t cols,
                         int8_t *codes) {
  if (!packed || !codes) return KT_ERR_ARGUMENT;
  const kt_status status = check_packed(format, rows, cols);
  if (status) return status;
  kt_audit_codes_scalar(format == KT_INT4, packed, rows, cols, codes);
  return KT_OK;
}
