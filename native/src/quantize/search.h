/* search.h - KT_RULE_SEARCH_1, and KT_RULE_SEARCH of groups or with importance: the scale of a row,
 * or group, with the smallest squared error (docs/formats.md, 3.6). The search is the same for
 * every level; a level provides the loop that sums over a row. */
#ifndef KT_SEARCH_H
#define KT_SEARCH_H

#include "../format/format.h"
#include "../format/scales.h"
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "rounding.h"

#include <math.h>

enum {
  KT_SEARCH_AT_ONCE = 8, /* scales that are tried in one pass over a row */
  KT_SEARCH_LANES = 16,  /* sums in binary32, of every 16th column, */
  KT_SEARCH_BLOCK = 512, /* of so many columns; those of blocks are added in binary64 */
  KT_SEARCH_LAST = 21,   /* candidates 0, 3, ... 21, then the neighbours of the best of them */
  KT_SEARCH_STEPS = 2    /* least-squares steps, as long as they help */
};

/* Of weights w with codes c under some scale, and importance v: */
typedef struct kt_code_sums {
  double product; /* v * |w| * |c| */
  double square;  /* v * c * c */
} kt_code_sums;

/* A row whose scale is searched. */
typedef struct kt_search_row {
  const float *magnitude; /* |w| of [cols], a multiple of 32; finite */
  int64_t cols;
  int exact;               /* the weights have 11 bits at most: |w| * |c| is not rounded */
  const float *importance; /* [cols], or NULL: ones */
  float top;               /* the largest level */
} kt_search_row;

/* Sums for `count` scales, 1, 4 or KT_SEARCH_AT_ONCE, by their inverses. */
typedef void kt_code_sums_fn(const kt_search_row *row, const float *inverse, int count,
                             kt_code_sums *sums);

/* Sums of a row in lanes, of one scale each. */
typedef struct kt_lane_sums {
  _Alignas(64) double product[KT_SEARCH_LANES];
  double square[KT_SEARCH_LANES];
} kt_lane_sums;

/* Lanes in ascending order. */
KT_INLINE void kt_add_lanes(const kt_lane_sums *lanes, const int count, kt_code_sums *sums) {
  for (int i = 0; i < count; i++) {
    double product = 0, square = 0;
    KT_UNROLL(16) for (int l = 0; l < KT_SEARCH_LANES; l++) {
      product += lanes[i].product[l];
      square += lanes[i].square[l];
    }
    sums[i] = (kt_code_sums){product, square};
  }
}

/* What decides about scales, and the best one so far. */
typedef struct kt_search {
  float first, units; /* the scale of the largest magnitude; scales per step between codes */
  int32_t scale_dtype;
  int best_candidate;
  float best;
  double gain; /* by how much the best one lowers the sum of v * w^2 */
  kt_code_sums sums;
} kt_search;

/* Candidate n of a search: from 1.06 (n = -2) down to 0.35 (n = 21) of the first scale. */
static inline float kt_search_candidate(const kt_search *search, int n) {
#define KT_FACTOR(n) (float)((420 - 13 * (n)) / 420.0)
#define KT_FACTORS(n) KT_FACTOR(n), KT_FACTOR(n + 1), KT_FACTOR(n + 2), KT_FACTOR(n + 3)
  static const float factor[KT_SEARCH_LAST + 3] = {KT_FACTORS(-2), KT_FACTORS(2),  KT_FACTORS(6),
                                                   KT_FACTORS(10), KT_FACTORS(14), KT_FACTORS(18)};
#undef KT_FACTORS
#undef KT_FACTOR
  const float scale = search->first * factor[n + 2];
  return search->scale_dtype == KT_SCALE_F32 ? scale : kt_scale_round(search->scale_dtype, scale);
}

/* Tries scales, `candidate` the number of each; a better one than all before becomes the best. */
KT_INLINE void kt_search_try(kt_search *search, const kt_search_row *row, const float *scale,
                             const int *candidate, const int count, kt_code_sums_fn *sum) {
  float inverse[KT_SEARCH_AT_ONCE];
  kt_code_sums sums[KT_SEARCH_AT_ONCE];
  for (int i = 0; i < count; i++) inverse[i] = 1.0f / (scale[i] * search->units);
  sum(row, inverse, count, sums);
  for (int i = 0; i < count; i++) {
    const double step = (double)(scale[i] * search->units);
    const double gain = step * (2.0 * sums[i].product - step * sums[i].square);
    if (!(gain > search->gain)) continue;
    search->gain = gain, search->best = scale[i], search->sums = sums[i];
    search->best_candidate = candidate[i];
  }
}

KT_INLINE void kt_search_candidates(kt_search *search, const kt_search_row *row,
                                    const int *candidate, const int count, kt_code_sums_fn *sum) {
  float scale[KT_SEARCH_AT_ONCE];
  for (int i = 0; i < count; i++) scale[i] = kt_search_candidate(search, candidate[i]);
  kt_search_try(search, row, scale, candidate, count, sum);
}

/* Candidates near the best one, those beyond the last as the last. */
KT_INLINE void kt_search_neighbours(kt_search *search, const kt_search_row *row,
                                    kt_code_sums_fn *sum) {
  enum { COUNT = 4 };
  static const int step[COUNT] = {-2, -1, 1, 2};
  int candidate[COUNT];
  for (int i = 0; i < COUNT; i++) {
    const int n = search->best_candidate + step[i];
    candidate[i] = n < KT_SEARCH_LAST ? n : KT_SEARCH_LAST;
  }
  kt_search_candidates(search, row, candidate, COUNT, sum);
}

/* The scale of a row whose largest magnitude is `amax`. Rows beyond 2^-60 .. 2^60, where products
 * could overflow or vanish, have the scale of that. */
static inline float kt_search_scale(const kt_layout *layout, const kt_search_row *row, float amax,
                                    kt_code_sums_fn *sum) {
  const kt_weight_format *const format = kt_format_of(layout);
  kt_search s = {.first = kt_scale_round(layout->scale_dtype, format->scale(amax)),
                 .units = (float)format->scale_units,
                 .scale_dtype = layout->scale_dtype,
                 .gain = -INFINITY};
  if (!(amax >= 0x1p-60f && amax <= 0x1p60f)) return s.first;
  static const int coarse[KT_SEARCH_AT_ONCE] = {0, 3, 6, 9, 12, 15, 18, 21};
  kt_search_candidates(&s, row, coarse, KT_SEARCH_AT_ONCE, sum);
  kt_search_neighbours(&s, row, sum);
  const float least = kt_search_candidate(&s, KT_SEARCH_LAST);
  for (int i = 0; i < KT_SEARCH_STEPS && s.sums.square > 0; i++) {
    const double step = s.sums.product / s.sums.square, before = s.gain;
    const float scale = kt_scale_round(layout->scale_dtype, (float)(step / (double)s.units));
    if (!(scale >= least)) break;
    kt_search_try(&s, row, &scale, &s.best_candidate, 1, sum);
    if (!(s.gain > before)) break;
  }
  return s.best;
}

/* Adds 16 columns, from k on, to the lanes of one scale. */
KT_INLINE void kt_add_columns_scalar(const kt_search_row *row, int64_t k, float inverse,
                                     const int weighted, float *product, float *square) {
  KT_LOOP
  for (int l = 0; l < KT_SEARCH_LANES; l++) {
    const float w = row->magnitude[k + l], v = weighted ? row->importance[k + l] : 1.0f;
    const float y = w * inverse, c = (float)kt_round_even(y < row->top ? y : row->top);
    product[l] += v * w * c;
    square[l] += v * (c * c);
  }
}

/* Adds columns `begin` to `end`, a block, to the wide lanes of one scale. */
KT_INLINE void kt_add_block_scalar(const kt_search_row *row, float inverse, int64_t begin,
                                   int64_t end, const int weighted, kt_lane_sums *lanes) {
  float product[KT_SEARCH_LANES] = {0}, square[KT_SEARCH_LANES] = {0};
  for (int64_t k = begin; k < end; k += KT_SEARCH_LANES)
    kt_add_columns_scalar(row, k, inverse, weighted, product, square);
  for (int l = 0; l < KT_SEARCH_LANES; l++) lanes->product[l] += (double)product[l];
  for (int l = 0; l < KT_SEARCH_LANES; l++) lanes->square[l] += (double)square[l];
}

/* The reference of every level. */
static inline void kt_code_sums_scalar(const kt_search_row *row, const float *inverse, int count,
                                       kt_code_sums *sums) {
  for (int i = 0; i < count; i++) {
    kt_lane_sums lanes = {0};
    for (int64_t begin = 0, end; begin < row->cols; begin = end) {
      end = begin + KT_SEARCH_BLOCK < row->cols ? begin + KT_SEARCH_BLOCK : row->cols;
      if (row->importance)
        kt_add_block_scalar(row, inverse[i], begin, end, 1, &lanes);
      else
        kt_add_block_scalar(row, inverse[i], begin, end, 0, &lanes);
    }
    kt_add_lanes(&lanes, 1, sums + i);
  }
}

#endif
