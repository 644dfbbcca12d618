/* Norms and rotations of few tokens, by the calling thread: waking others would take longer. */
#include "../simd/float_mode.h"
#include "dense.h"

#include <math.h>

kt_status kt_rms_norm(const kt_norm *norm, int64_t rows, const void *x, void *y) {
  if (!norm || norm->cols < 1 || norm->cols > INT32_MAX || rows < 0 || rows > INT32_MAX)
    return KT_ERR_ARGUMENT;
  if (norm->kind < KT_NORM_ROUNDED || norm->kind > KT_NORM_PLUS_ONE || !(norm->epsilon >= 0.0f) ||
      !kt_is_bf16_array(norm->weight))
    return KT_ERR_ARGUMENT;
  if (!rows) return KT_OK;
  if (!kt_is_bf16_array(x) || !kt_is_bf16_array(y)) return KT_ERR_ARGUMENT;
  const kt_dense_math *const math = kt_dense_math_best();
  const uint64_t mode = kt_float_mode_enter();
  for (int64_t r = 0; r < rows; r++) {
    const kt_bf16_rows row = {(const uint16_t *)x + r * norm->cols, 1, norm->cols, norm->cols};
    float sum;
    math->dots(&row, &row, &sum, 1);
    const float factor = 1.0f / sqrtf(sum / (float)norm->cols + norm->epsilon);
    math->scale(norm, row.row, factor, (uint16_t *)y + r * norm->cols);
  }
  kt_float_mode_leave(mode);
  return KT_OK;
}

kt_status kt_rotate(int64_t heads, int64_t cols, const void *x, const void *cosine,
                    const void *sine, void *y) {
  if (heads < 0 || heads > INT32_MAX || cols < 2 || cols % 2 || cols > INT32_MAX)
    return KT_ERR_ARGUMENT;
  if (!heads) return KT_OK;
  if (!kt_is_bf16_array(x) || !kt_is_bf16_array(cosine) || !kt_is_bf16_array(sine) ||
      !kt_is_bf16_array(y))
    return KT_ERR_ARGUMENT;
  const kt_dense_math *const math = kt_dense_math_best();
  const uint64_t mode = kt_float_mode_enter();
  for (int64_t h = 0; h < heads; h++)
    math->rotate(cols, (const uint16_t *)x + h * cols, cosine, sine, (uint16_t *)y + h * cols);
  kt_float_mode_leave(mode);
  return KT_OK;
}
