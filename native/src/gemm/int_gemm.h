/* int_gemm.h - what products with INT8 and INT4 in KTransformers' layout share.
 *
 *   out = fl32(fl32(sum of code * activation code) * (step * scale of w)) * scale of x
 *
 * The sum is an exact integer: |code * activation| <= 127 * 127 allows 133 000 columns; the
 * biased sums of the vector code wrap around modulo 2^32 and back. */
#ifndef KT_INT_GEMM_H
#define KT_INT_GEMM_H

#include "../moe/gemm.h"
#include "../quantize/layout.h"

typedef void kt_unpack_row_fn(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                              int8_t *codes);

/* The truth: one row of w at a time, unpacked into panel. */
void kt_int_product_rows(kt_unpack_row_fn *unpack_row, float step, const kt_weight *w,
                         int64_t strip, int64_t strips, const uint8_t *x, int64_t stride,
                         int64_t tokens, float *out, uint8_t *panel);

/* Codes are packed already, so packing for the kernel is packing. */
kt_status kt_int_gemm_pack(int format, int64_t rows, int64_t cols, const void *codes,
                           const void *scale, uint8_t *packed, void *packed_scale);

/* Both formats: no groups, float scales, whole tiles of columns. */
int kt_int_gemm_steps(const kt_layout *layout, int64_t tile_cols, int64_t *rows_step,
                      int64_t *cols_step);

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
