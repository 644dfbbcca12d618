/* compensate.h - choosing the codes of some columns, one after the other, each time spreading the
 * error over the columns that follow (docs/formats.md, 3.7). One loop, one file per level: the
 * compiler makes of it what the level allows; rows are lanes, so every element sees the same
 * operations in the same order everywhere. */
#ifndef KT_COMPENSATE_H
#define KT_COMPENSATE_H

#include "ktconv.h"

enum { KT_COMPENSATE_ROWS = 16 }; /* rows that are in work at a time: the lanes of a loop */

/* kt_compensate's arguments, checked. */
typedef struct kt_compensate_job {
  float top;
  int64_t rows, cols, groups, stride;
  const float *weights, *factor, *step;
  const int32_t *group_of_col;
  int8_t *codes;
  float *errors;
  double *loss;
} kt_compensate_job;

typedef void kt_compensate_fn(const kt_compensate_job *job);
kt_compensate_fn kt_compensate_scalar, kt_compensate_avx2, kt_compensate_avx512;

#endif
