/* int_gemm.h - what products with INT8 and INT4 in KTransformers' layout share.
 *
 *   out = fl32(fl32(sum of code * activation code) * (step * scale of w)) * scale of x
 *
 * The sum is an exact integer: |code * activation| <= 127 * 127 allows 133 000 columns; the
 * biased sums of the vector code wrap around modulo 2^32 and back. */
#ifndef KT_INT_GEMM_H
#define KT_INT_GEMM_H

#include "../format/format.h"
#include "../format/int_tiles.h"

/* The reference: one row of w at a time, unpacked into panel. */
kt_product_fn kt_int_product_scalar;

/* What follows the codes of an activation row. */
static inline float kt_int_row_scale(const uint8_t *row, int64_t cols) {
  float scale;
  __builtin_memcpy(&scale, row + cols, sizeof scale);
  return scale;
}

static inline int32_t kt_int_row_sum(const uint8_t *row, int64_t cols) {
  int32_t sum;
  __builtin_memcpy(&sum, row + cols + sizeof(float), sizeof sum);
  return sum;
}

#endif
