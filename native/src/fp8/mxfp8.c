/* The table row of MXFP8 weights, and their numbers. */
#include "fp8.h"

#include "../simd/bits.h"

#include <float.h>
#include <math.h>

static double value_of(const kt_weight *w, int64_t n, int64_t k) {
  return kt_bf16_value(kt_fp8_number(w, n, k)) * kt_group_scale(w, n, k / KT_MXFP8_GROUP);
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k++) out[k] = value_of(w, n, k);
}

/* Times the scale. Below 2^-126 it is 0, for which VDPBF16PS takes what is denormal, and of which
 * bf16 does not have all; from 2^128 on it is infinity, as in binary32. */
static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  const double value = value_of(w, n, k);
  return kt_bf16_bits((float)(fabs(value) < (double)FLT_MIN ? copysign(0.0, value) : value));
}

const kt_weight_format kt_mxfp8_format = {
    .bits = 8,
    .plain_bits = 8,
    .col_multiple = KT_TILE_COLS,
    .group_count = 1,
    .groups = {KT_MXFP8_GROUP},
    .scale_dtypes = 1u << KT_SCALE_UE8M0,
    .scale_rows = 1,
    .scale_units = 1,
    .unpack_row = kt_fp8_unpack_row,
    .pack_tile = kt_fp8_pack_tile,
    .is_finite = kt_fp8_is_finite,
    .decode_row = decode_row,
    .number = number,
    .scaled_strips = 1u << KT_SCALE_UE8M0,
    .least_tokens = {2},
    KT_BF16_CELLS(mxfp8),
};
