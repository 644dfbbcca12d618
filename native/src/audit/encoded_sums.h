/* encoded_sums.h - what the comparison of encoded integers adds up. */
#ifndef KT_AUDIT_ENCODED_SUMS_H
#define KT_AUDIT_ENCODED_SUMS_H

#include "encoded.h"
#include "source_numbers.h"

enum { LANES = 16, PIECE = KT_AUDIT_GROUP_COLS };

/* What is known so far of a row's present group: bits of its largest magnitude. */
typedef struct group_state {
  int32_t most;
} group_state;

/* Sums of some columns of a row. */
typedef struct row_sums {
  float source[LANES], error[LANES], value[LANES], most_steps[LANES];
  int32_t zeros[LANES], others[LANES]; /* of floating-point codes */
} row_sums;

/* Sums over everything, in lanes that are added up at the end. */
typedef struct sums {
  _Alignas(64) double source[LANES], error[LANES], value[LANES];
  float most_steps[LANES];
  int64_t zeros, others; /* codes that are 0, and those that are not the rule's */
} sums;

/* What all columns of a run have in common. */
typedef struct run_terms {
  float scale, precise; /* precise: whether steps count, 1 or 0 */
} run_terms;

#endif
