/* rows.h - int8 codes of activations: the rule, and what each level provides. */
#ifndef KT_ROWS_H
#define KT_ROWS_H

#include "../quantize/rounding.h"
#include "../simd/bits.h"
#include "gemm.h"

#include <float.h>

/* Scale of a run of values from the bits of its largest magnitude; *inverse is what values
 * are multiplied by. A NaN or Inf makes the scale NaN and all codes 0, so that products
 * with the run are NaN too; a run too small to have a scale is zero. */
static inline float kt_rows_scale(uint32_t max_bits, float *inverse) {
  const float scale = kt_float(max_bits) * (1.0f / 127.0f);
  const int finite = max_bits < KT_NONFINITE_BITS, usable = finite && scale >= FLT_MIN;
  *inverse = usable ? 1.0f / scale : 0.0f;
  return usable ? scale : finite ? 0.0f : kt_float(0x7fc00000u);
}

/* Codes of `cols` values, their scale, and the sum of the codes. cols % 16 == 0. */
typedef void kt_rows_codes_fn(const float *x, int64_t cols, int8_t *codes, float *scale,
                              int32_t *sum);
kt_rows_codes_fn kt_rows_codes_scalar, kt_rows_codes_avx512;

/* bf16, ties to even; a NaN stays a NaN. n % 16 == 0. */
typedef void kt_rows_16_fn(const float *x, int64_t n, uint16_t *out);
kt_rows_16_fn kt_rows_bf16_scalar, kt_rows_bf16_avx512;

/* binary16, ties to even; a NaN stays one, with the upper bits of its payload. n % 16 == 0. */
kt_rows_16_fn kt_rows_f16_scalar, kt_rows_f16_avx512;

/* n values in the dtype KT_BF16, KT_F16 or KT_F32. */
void kt_rows_store(int dtype, const float *x, int64_t n, void *out);

#endif
