/* Public entry point of the comparison of blocks of ggml: check, pick the level, call. */
#include "blocks.h"

#include "../cpu.h"
#include "../simd/float_mode.h"
#include "../source/matrix.h"

static kt_audited_blocks_fn *const levels[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_audited_blocks_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_audited_blocks_avx2,
    [KT_ISA_AVX512] = kt_audited_blocks_avx512,
#endif
};

kt_status kt_audit_blocks(int32_t dtype, const kt_matrix *source, const void *blocks,
                          kt_encoded_audit *audit) {
  kt_stored_unit unit;
  kt_status status = kt_matrix_check(source);
  if (!status) status = kt_dtype_unit(dtype, &unit);
  if (status) return status;
  const int known = dtype == KT_Q4_0 || dtype == KT_Q8_0 || dtype == KT_Q4_K || dtype == KT_Q5_K ||
                    dtype == KT_Q6_K || dtype == KT_IQ4_NL || dtype == KT_MXFP4;
  if (!known || !blocks || !audit) return KT_ERR_ARGUMENT;
  if (source->cols % unit.cols || (source->rows % 32 && source->col_stride != 1))
    return KT_ERR_SHAPE;
  *audit = (kt_encoded_audit){0};
  const kt_audited_blocks job = {source, dtype, blocks};
  const uint64_t mode = kt_float_mode_enter();
  KT_CELL(levels)(&job, audit);
  kt_float_mode_leave(mode);
  return KT_OK;
}
