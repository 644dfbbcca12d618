/* The public entry point of error compensation: check, pick the level, call. */
#include "compensate.h"

#include "../cpu.h"
#include "../format/format.h"
#include "../simd/float_mode.h"

static kt_compensate_fn *const compensations[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_compensate_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_compensate_avx2,
    [KT_ISA_AVX512] = kt_compensate_avx512,
#endif
};

static int groups_in_range(const int32_t *group_of_col, int64_t cols, int64_t groups) {
  for (int64_t k = 0; k < cols; k++)
    if (group_of_col[k] < 0 || group_of_col[k] >= groups) return 0;
  return 1;
}

static int diagonal_is_positive(const float *factor, int64_t cols) {
  for (int64_t k = 0; k < cols; k++)
    if (!(factor[k * cols + k] > 0.0f)) return 0;
  return 1;
}

kt_status kt_compensate(int32_t max_level, int64_t rows, int64_t cols, const float *weights,
                        int64_t stride, const float *factor, const float *step, int64_t groups,
                        const int32_t *group_of_col, int8_t *codes, float *errors, double *loss) {
  if (!weights || !factor || !step || !group_of_col || !codes || !errors || !loss)
    return KT_ERR_ARGUMENT;
  if (max_level < 1 || max_level > 127 || rows < 1 || cols < 1 || groups < 1)
    return KT_ERR_ARGUMENT;
  if (cols > KT_COMPENSATE_COLS) return KT_ERR_SHAPE;
  if (stride < rows) return KT_ERR_STRIDE;
  const int64_t most = INT64_MAX / (int64_t)sizeof(double);
  if (stride > most / cols || rows > most / groups) return KT_ERR_SHAPE;
  if (!groups_in_range(group_of_col, cols, groups) || !diagonal_is_positive(factor, cols))
    return KT_ERR_SCALE;
  const kt_compensate_job job = {.top = (float)max_level,
                                 .rows = rows,
                                 .cols = cols,
                                 .groups = groups,
                                 .stride = stride,
                                 .weights = weights,
                                 .factor = factor,
                                 .step = step,
                                 .group_of_col = group_of_col,
                                 .codes = codes,
                                 .errors = errors,
                                 .loss = loss};
  const uint64_t mode = kt_float_mode_enter();
  KT_CELL(compensations)(&job);
  kt_float_mode_leave(mode);
  return KT_OK;
}
