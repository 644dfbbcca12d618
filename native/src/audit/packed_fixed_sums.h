/* packed_fixed_sums.h - what the search in fixed point adds up of a row. */
#ifndef KT_AUDIT_PACKED_FIXED_SUMS_H
#define KT_AUDIT_PACKED_FIXED_SUMS_H

#include "source_numbers.h"

/* Of weights as integers: themselves; the squares of a 32nd of them. */
typedef struct moments {
  int64_t ones, squares;
} moments;

/* A row of weights as integers; of INT4, their sum. */
typedef struct integer_row {
  const int16_t *weight;
  int64_t cols, total;
} integer_row;

/* Of weights and codes under some step: their products; the codes' squares. */
typedef struct integer_sums {
  int64_t product, square;
} integer_sums;

/* Sums of a row for `count` steps: 4, or 2 of INT4. */
typedef void kt_audit_sums_fn(const integer_row *row, int bits, const int *step, int count,
                              integer_sums *sums);
kt_audit_sums_fn kt_audit_sums_scalar, kt_audit_sums_avx2, kt_audit_sums_avx512, kt_audit_sums_vnni;

/* 2^26 over a step of INT4, 2^23 over one of INT8: the nearest integer. */
INLINE uint32_t inverse_of(int step, const int bits) {
  const uint32_t one = bits == 4 ? 1u << 26 : 1u << 23, divisor = (uint32_t)step;
  return (2 * one + divisor) / (2 * divisor);
}

#endif
