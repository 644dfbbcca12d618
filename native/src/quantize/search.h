/* search.h - KT_RULE_SEARCH: the scale of a row, or group, with the smallest squared error
 * (docs/formats.md, 3.6). The search is the same for every level; a level provides the loop that
 * sums over a row. */
#ifndef KT_SEARCH_H
#define KT_SEARCH_H

#include "../format/format.h"
#include "../format/scales.h"
#include "../simd/target.h"
#include "rounding.h"

#include <math.h>

enum {
  KT_SEARCH_AT_ONCE = 4, /* scales that are tried in one pass over a row */
  KT_SEARCH_LANES = 16,  /* sums in binary32, of every 16th column, */
  KT_SEARCH_BLOCK = 512, /* of so many columns; those of blocks are added in binary64 */
  KT_SEARCH_LAST = 21,   /* candidates 0, 3, ... 21, then the neighbours of the best of them */
  KT_SEARCH_STEPS = 2    /* least-squares steps, as long as they help */
};

/* How the weights of a row lie in memory, a compile-time constant in every loop. */
enum { KT_ROW_BF16, KT_ROW_F32 };

/* Of weights w with codes c under some scale, and importance v: */
typedef struct kt_code_sums {
  double product; /* v * |w| * |c| */
  double square;  /* v * c * c */
} kt_code_sums;

/* A row whose scale is searched. */
typedef struct kt_search_row {
  const uint8_t *weights; /* [cols], a multiple of 32; finite */
  int form;
  int64_t cols;
  const float *importance; /* [cols], or NULL: ones */
  float top;               /* the largest level */
} kt_search_row;

/* Sums for `count` scales, 1 or KT_SEARCH_AT_ONCE, by their inverses. */
typedef void kt_code_sums_fn(const kt_search_row *row, const float *inverse, int count,
                             kt_code_sums *sums);

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
  return kt_scale_round(search->scale_dtype,
                        search->first * (float)((double)(420 - 13 * n) / 420.0));
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

KT_INLINE void kt_search_four(kt_search *search, const kt_search_row *row, const int *candidate,
                              kt_code_sums_fn *sum) {
  float scale[KT_SEARCH_AT_ONCE];
  for (int i = 0; i < KT_SEARCH_AT_ONCE; i++) scale[i] = kt_search_candidate(search, candidate[i]);
  kt_search_try(search, row, scale, candidate, KT_SEARCH_AT_ONCE, sum);
}

/* The scale of a row whose largest magnitude is `amax`. Rows beyond 2^-60 .. 2^60, where products
 * could overflow or vanish, have the scale of that. */
KT_INLINE float kt_search_scale(const kt_layout *layout, const kt_search_row *row, float amax,
                                kt_code_sums_fn *sum) {
  const kt_weight_format *const format = kt_format_of(layout);
  kt_search s = {.first = kt_scale_round(layout->scale_dtype, format->scale(amax)),
                 .units = (float)format->scale_units,
                 .scale_dtype = layout->scale_dtype,
                 .gain = -INFINITY};
  if (!(amax >= 0x1p-60f && amax <= 0x1p60f)) return s.first;
  static const int coarse[2][KT_SEARCH_AT_ONCE] = {{0, 3, 6, 9}, {12, 15, 18, 21}};
  kt_search_four(&s, row, coarse[0], sum);
  kt_search_four(&s, row, coarse[1], sum);
  int fine[KT_SEARCH_AT_ONCE];
  static const int near[KT_SEARCH_AT_ONCE] = {-2, -1, 1, 2};
  for (int i = 0; i < KT_SEARCH_AT_ONCE; i++) {
    const int n = s.best_candidate + near[i];
    fine[i] = n < KT_SEARCH_LAST ? n : KT_SEARCH_LAST;
  }
  kt_search_four(&s, row, fine, sum);
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

/* The reference of every level; rows in binary32. */
static inline void kt_code_sums_scalar(const kt_search_row *row, const float *inverse, int count,
                                       kt_code_sums *sums) {
  for (int i = 0; i < count; i++) {
    double product[KT_SEARCH_LANES] = {0}, square[KT_SEARCH_LANES] = {0};
    for (int64_t begin = 0, end; begin < row->cols; begin = end) {
      float p[KT_SEARCH_LANES] = {0}, s[KT_SEARCH_LANES] = {0};
      end = begin + KT_SEARCH_BLOCK < row->cols ? begin + KT_SEARCH_BLOCK : row->cols;
      for (int64_t k = begin; k < end; k++) {
        float w;
        memcpy(&w, row->weights + 4 * k, sizeof w);
        w = fabsf(w);
        const float v = row->importance ? row->importance[k] : 1.0f, y = w * inverse[i];
        const float c = (float)kt_round_even(y < row->top ? y : row->top);
        p[k % KT_SEARCH_LANES] += v * w * c;
        s[k % KT_SEARCH_LANES] += v * (c * c);
      }
      for (int l = 0; l < KT_SEARCH_LANES; l++) product[l] += (double)p[l];
      for (int l = 0; l < KT_SEARCH_LANES; l++) square[l] += (double)s[l];
    }
    sums[i] = (kt_code_sums){0};
    for (int l = 0; l < KT_SEARCH_LANES; l++) sums[i].product += product[l];
    for (int l = 0; l < KT_SEARCH_LANES; l++) sums[i].square += square[l];
  }
}

#endif
