/* group_gemm.h - what products with integers in groups of columns share: GINT4 and GINT8.
 *
 *   out = sum over groups of (sum of code * activation code) * (scale of w * scale of x)
 *
 * with activations in KT_ROWS_GROUP rows of the same groups. The inner sum is an exact
 * integer; groups are added in ascending order by one fused operation each, the product of
 * scales being rounded first: the same bits on every level.
 *
 * Codes are stored plus half of their range, 8 or 128. A tile is 32 rows x 32 columns; 4 columns
 * of 32 rows are one 64-byte line of nibbles (GINT4: low ones are the rows 0..15), or two lines
 * of bytes (GINT8: rows 0..15, then 16..31). */
#ifndef KT_GROUP_GEMM_H
#define KT_GROUP_GEMM_H

#include "bf16_gemm.h"

/* Bytes of a tile of codes with so many bits, and what is added to codes. */
enum { KT_GROUP_TILE_PER_BIT = KT_STRIP * KT_TILE_COLS / 8 };
#define KT_GROUP_TILE(bits) ((bits) * KT_GROUP_TILE_PER_BIT)
#define KT_GROUP_BIAS(bits) (1 << ((bits) - 1))

/* What follows the codes of an activation row. */
static inline const float *kt_group_x_scale(const uint8_t *row, int64_t cols) {
  return (const float *)(const void *)(row + kt_rows_codes_size(KT_ROWS_GROUP, cols));
}

static inline const int32_t *kt_group_x_sum(const uint8_t *row, int64_t cols, int64_t groups) {
  return (const int32_t *)(const void *)(kt_group_x_scale(row, cols) + groups);
}

/* The reference. */
kt_product_fn kt_group_product_scalar;

#endif
