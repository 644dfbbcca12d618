/* packed_sums.h - what the audit adds up. */
#ifndef KT_AUDIT_PACKED_SUMS_H
#define KT_AUDIT_PACKED_SUMS_H

#include "source_numbers.h"

enum { LANES = 16 };

/* What is known so far of a row and of its present group, in lanes that are added up at the end:
 * then neither the order of sums nor their bits depend on how wide the machine's vectors are. */
typedef struct group_state {
  float most_error[LANES], most_source[LANES];
  int64_t squares, zeros, invalid; /* of codes: the sum of their squares, how many are so */
} group_state;

typedef struct row_state {
  _Alignas(64) double source[LANES]; /* squares, */
  double error[LANES];               /* likewise */
  group_state group;
} row_state;

INLINE float larger(float a, float b) { return a > b ? a : b; }

#endif
