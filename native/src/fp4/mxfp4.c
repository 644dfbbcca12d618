/* The table row of MXFP4 weights, their packing and their numbers. */
#include "fp4.h"

#include "../simd/bits.h"

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  (void)rows;
  for (int64_t k = 0; k < cols; k += KT_TILE_COLS)
    kt_fp4_unpack_row(packed + kt_bf16_tile_start(cols, KT_FP4_TILE, n, k), n, codes + k / 2);
}

/* The bf16 bits of a code. */
static uint16_t code_at(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t tile = kt_bf16_tile_start(w->cols, KT_FP4_TILE, n, k);
  return kt_fp4_bf16[kt_fp4_code_at(w->codes + tile, n, k)];
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k++)
    out[k] = kt_bf16_value(code_at(w, n, k)) * kt_group_scale(w, n, k / KT_MXFP4_GROUP);
}

/* Times the scale, where that is a power of two. Down to 2^-128, the smallest, bf16 has the product
 * (below 2^-126 as a denormal, which VDPBF16PS takes for 0); from 2^128 on it is infinity, as in
 * binary32. */
static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  const uint16_t code = code_at(w, n, k);
  if (w->layout.scale_dtype != KT_SCALE_UE8M0) return code;
  return kt_bf16_bits((float)(kt_bf16_value(code) * kt_group_scale(w, n, k / KT_MXFP4_GROUP)));
}

const kt_weight_format kt_mxfp4_format = {
    .bits = 4,
    .plain_bits = 4,
    .col_multiple = KT_TILE_COLS,
    .group_count = 1,
    .groups = {KT_MXFP4_GROUP},
    .scale_dtypes = 1u << KT_SCALE_UE8M0 | 1u << KT_SCALE_BF16,
    .scale_rows = 1,
    .unpack_row = unpack_row,
    .pack_tile = kt_fp4_pack_tile,
    .scale_units = 1,
    .decode_row = decode_row,
    .number = number,
    .scaled_strips = 1u << KT_SCALE_UE8M0,
    .least_tokens = {3},
    KT_BF16_CELLS(mxfp4),
};
