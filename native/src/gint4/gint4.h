/* gint4.h - group INT4: codes -8..7, a scale per 32, 64 or 128 columns of a row.
 *
 *   out = sum over groups of (sum of code * activation code) * (scale of w * scale of x)
 *
 * with activations in KT_ROWS_GROUP rows of the same groups. The inner sum is an exact
 * integer; groups are added in ascending order by one fused operation each, the product of
 * scales being rounded first: the same bits on every level.
 *
 * Codes are stored plus 8. A packed line is 32 rows x 4 columns of a tile of 32 columns: byte
 * c of word r has column 4p + c of row r in its low and of row r + 16 in its high nibble, p
 * being the number of the line in its tile. */
#ifndef KT_GINT4_H
#define KT_GINT4_H

#include "../gemm/bf16_gemm.h"

enum { KT_GINT4_TILE = 512, KT_GINT4_BIAS = 8 };

kt_transpose_fn kt_gint4_transpose_scalar, kt_gint4_transpose_avx512;
kt_product_fn kt_gint4_product_scalar, kt_gint4_product_avx512, kt_gint4_product_amx;

/* What follows the codes of an activation row. */
static inline const float *kt_gint4_x_scale(const uint8_t *row, int64_t cols) {
  return (const float *)(const void *)(row + kt_rows_codes_size(KT_ROWS_GROUP, cols));
}

static inline const int32_t *kt_gint4_x_sum(const uint8_t *row, int64_t cols, int64_t groups) {
  return (const int32_t *)(const void *)(kt_gint4_x_scale(row, cols) + groups);
}

#endif
