/* encoded_sums.h - what the comparison of encoded weights adds up, and its floating-point numbers.
 */
#ifndef KT_AUDIT_ENCODED_SUMS_H
#define KT_AUDIT_ENCODED_SUMS_H

#include "encoded.h"
#include "source_numbers.h"

enum { LANES = 16, PIECE = KT_AUDIT_GROUP_COLS };

/* Magnitudes by place. Places below `normal` are multiples of `least`; others have the fields of
 * binary32 from bit `shift` on, with a bias smaller by `bias`. */
typedef struct float_kind {
  int32_t top, normal, bias; /* top: the place of the largest magnitude */
  int shift, sign;           /* sign: the bit of a code that is its sign */
  float least;
} float_kind;

static const float_kind e4m3 = {126, 8, 120, 20, 7, 0x1p-9f}, e2m1 = {7, 2, 126, 22, 3, 0x1p-1f};

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
  int64_t zeros, others; /* codes that are 0, and those that are not the rule's */
  float known;           /* the most steps that a code is off, so far */
} sums;

/* What all columns of a run have in common. */
typedef struct run_terms {
  float scale, precise; /* precise: whether steps count, 1 or 0 */
} run_terms;

/* Levels that compare 4-bit codes without a quotient have intervals of weights instead, smaller by
 * SLACK: more than what rounding adds. */
#define SLACK 0x1p-20f
#define ABOVE(x) ((x) + ((x) < 0 ? -(x) : (x)) * SLACK)
#define BELOW(x) ((x) - ((x) < 0 ? -(x) : (x)) * SLACK)

/* Steps of certainly less than `known`, also after rounding; quotients are 8 more at most. */
INLINE float certain_steps(float known) { return known - (known + 8.0f) * SLACK; }

#endif
