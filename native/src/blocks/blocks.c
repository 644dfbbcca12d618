/* Public entry point of blocks of ggml: check, pick the level, call. */
#include "blocks.h"

#include "../cpu.h"
#include "../simd/float_mode.h"

static kt_blocks_fn *const levels[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_blocks_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_blocks_avx2,
    [KT_ISA_AVX512] = kt_blocks_avx512,
#endif
};

static int is_encoded(int32_t dtype) {
  switch (dtype) {
  case KT_Q4_0:
  case KT_Q8_0:
  case KT_Q4_K:
  case KT_Q5_K:
  case KT_Q6_K:
  case KT_IQ4_NL:
  case KT_MXFP4: return 1;
  default: return 0;
  }
}

static int usable(const float *importance, int64_t cols) {
  for (int64_t k = 0; importance && k < cols; k++)
    if (!(importance[k] >= 0 && importance[k] <= 1e12f)) return 0;
  return 1;
}

/* Whether columns count differently at all: if not, they are as without importance. */
static int differs(const float *importance, int64_t cols) {
  for (int64_t k = 1; importance && k < cols; k++)
    if (importance[k] != importance[0]) return 1;
  return 0;
}

kt_status kt_encode_blocks(int32_t dtype, const kt_matrix *matrix, const float *importance,
                           void *blocks, void *scratch, size_t scratch_size, kt_position *bad) {
  kt_stored_unit unit;
  kt_status status = kt_matrix_check(matrix);
  if (!status) status = kt_dtype_unit(dtype, &unit);
  if (status) return status;
  if (!is_encoded(dtype) || !blocks || !usable(importance, matrix->cols)) return KT_ERR_ARGUMENT;
  if (matrix->cols % unit.cols) return KT_ERR_SHAPE;
  if (!scratch || scratch_size < kt_scratch_size(matrix->cols)) return KT_ERR_SCRATCH;
  const kt_blocks_job job = {.dtype = dtype,
                             .unit_cols = unit.cols,
                             .unit_bytes = unit.bytes,
                             .source = matrix,
                             .importance = differs(importance, matrix->cols) ? importance : NULL,
                             .blocks = blocks,
                             .scratch = scratch,
                             .decode = kt_decode_rows_best()};
  const uint64_t mode = kt_float_mode_enter();
  status = KT_CELL(levels)(&job);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}
