/* scales.h - where scales lie, and what they are worth.
 *
 *   group 0       [rows], plain and packed
 *   group > 0     packed [strips of 32 rows][groups][32 rows], so that kernels load those of a
 *                 strip side by side
 *   several rows  (scale_rows > 1) packed [strips][groups]: one number for all rows of a strip */
#ifndef KT_SCALES_H
#define KT_SCALES_H

#include "format.h"

/* Bytes of one scale. */
int32_t kt_scale_bytes(int32_t dtype);

/* Packed scales of a matrix. */
int64_t kt_scale_count(const kt_layout *layout, int64_t rows, int64_t cols);

/* Index of the packed scale of (row n, group g); of every row's own. */
static inline int64_t kt_group_scale_index(int64_t cols, int64_t group, int64_t n, int64_t g) {
  return (n / KT_STRIP * (cols / group) + g) * KT_STRIP + n % KT_STRIP;
}

/* The value of scale i, exact. */
double kt_scale_value(int32_t dtype, const void *scale, int64_t i);

/* The same of the packed scale of (row n, group g). */
double kt_group_scale(const kt_weight *w, int64_t n, int64_t g);

/* The scale of a row or group of codes of 8 bits, from its largest magnitude: amax * fl32(1/127), a
 * product, not a quotient. */
float kt_scale_to_127(float amax);

/* A finite value >= 0 as the dtype stores it, F32 or BF16: rounded to nearest, ties to even. */
float kt_scale_round(int32_t dtype, float value);

/* Stores a value that kt_scale_round has returned. */
void kt_scale_store(int32_t dtype, void *scale, int64_t i, float value);

/* Between the two orders. KT_ERR_NONFINITE for NaN and Inf, of pack alone. */
kt_status kt_scales_pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *plain,
                         void *packed);
void kt_scales_unpack(const kt_layout *layout, int64_t rows, int64_t cols, const void *packed,
                      void *plain);

#endif
