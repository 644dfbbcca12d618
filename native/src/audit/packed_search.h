/* packed_search.h - the scale that KT_RULE_SEARCH_1 gives, from docs/formats.md 3.6 alone. */
#ifndef KT_AUDIT_PACKED_SEARCH_H
#define KT_AUDIT_PACKED_SEARCH_H

#include "packed_values.h"

#include <math.h>

/* CANDIDATES: the most scales that one step of formats.md tries. AT_ONCE, of each level: scales
 * that are tried in one pass over a row; more sums than registers hold would take longer. HAS_FMA,
 * likewise: whether a multiply-add is an instruction (clang defines no __FMA__ in a target). */
enum { SUMS = 16, SUMS_BLOCK = 512, CANDIDATES = 8 };

/* A loop that becomes vectors: unrolled before that, it would not. */
#if defined(__clang__)
#define VECTOR_LOOP
#else
#define VECTOR_LOOP _Pragma("GCC unroll 1")
#endif

/* A row or group: magnitudes of its weights, and what their squared errors count. */
typedef struct searched {
  const float *weight, *importance; /* [cols]; importance NULL: 1 */
  int64_t cols;
  float amax, first; /* the scale that amax makes, as it is stored */
  int exact;         /* products of weights and codes are not rounded: short mantissas */
  const kt_audit_job *job;
} searched;

/* A scale that was tried; gain: by how much it lowers the error of a row of zeros. */
typedef struct tried {
  float scale;
  double gain, product, square;
} tried;

/* What formats.md adds up of the codes of a row: lanes in binary32, then in binary64. */
typedef struct code_sums {
  _Alignas(64) float product[SUMS], square[SUMS];
} code_sums;

typedef struct wide_sums {
  double product[SUMS], square[SUMS];
} wide_sums;

INLINE float nearest_code(float weight, float inverse, float top) {
  const float y = weight * inverse;
  return ((y < top ? y : top) + 0x1.8p23f) - 0x1.8p23f;
}

/* sum + a * b of an exact product, which may be fused where that is fast. */
INLINE float add_exact(float sum, float a, float b) {
  return HAS_FMA ? __builtin_fmaf(a, b, sum) : sum + a * b;
}

/* Adds 16 columns to the lanes of one scale. Products of codes are exact. */
INLINE void add_columns(const float *weight, const float *importance, float inverse, float top,
                        const int exact, code_sums *sums) {
  VECTOR_LOOP
  for (int i = 0; i < SUMS; i++) {
    const float c = nearest_code(weight[i], inverse, top);
    if (importance) {
      sums->product[i] += importance[i] * weight[i] * c;
      sums->square[i] += importance[i] * (c * c);
      continue;
    }
    sums->product[i] =
        exact ? add_exact(sums->product[i], weight[i], c) : sums->product[i] + weight[i] * c;
    sums->square[i] = add_exact(sums->square[i], c, c);
  }
}

INLINE void add_block(const searched *row, int64_t begin, const float *inverse, const int count,
                      const int weighted, const int exact, wide_sums *wide) {
  const int64_t end = least(begin + SUMS_BLOCK, row->cols);
  const float top = row->job->format->top;
  code_sums sums[AT_ONCE];
  for (int n = 0; n < count; n++) sums[n] = (code_sums){0};
  for (int64_t k = begin; k < end; k += SUMS)
    for (int n = 0; n < count; n++)
      add_columns(row->weight + k, weighted ? row->importance + k : NULL, inverse[n], top, exact,
                  sums + n);
  for (int n = 0; n < count; n++)
    for (int i = 0; i < SUMS; i++) {
      wide[n].product[i] += (double)sums[n].product[i];
      wide[n].square[i] += (double)sums[n].square[i];
    }
}

/* Tries `count` scales. */
INLINE void try_each(const searched *row, const float *scale, const int count, const int weighted,
                     const int exact, tried *found) {
  float inverse[AT_ONCE], step[AT_ONCE];
  wide_sums wide[AT_ONCE];
  for (int n = 0; n < count; n++) {
    wide[n] = (wide_sums){0};
    step[n] = scale[n] * row->job->format->units;
    inverse[n] = 1.0f / step[n];
  }
  for (int64_t k = 0; k < row->cols; k += SUMS_BLOCK)
    add_block(row, k, inverse, count, weighted, exact, wide);
  for (int n = 0; n < count; n++) {
    double product = 0, square = 0;
    for (int i = 0; i < SUMS; i++) product += wide[n].product[i];
    for (int i = 0; i < SUMS; i++) square += wide[n].square[i];
    const double size = (double)step[n], gain = size * (2.0 * product - size * square);
    found[n] = (tried){scale[n], gain, product, square};
  }
}

/* Functions of their own, so that sums get all registers. */
static __attribute__((noinline)) void try_some(const searched *row, const float *scale,
                                               tried *found) {
  if (row->importance)
    try_each(row, scale, AT_ONCE, 1, 0, found);
  else if (row->exact)
    try_each(row, scale, AT_ONCE, 0, 1, found);
  else
    try_each(row, scale, AT_ONCE, 0, 0, found);
}

static __attribute__((noinline)) void try_one(const searched *row, const float *scale,
                                              tried *found) {
  if (row->importance)
    try_each(row, scale, 1, 1, 0, found);
  else if (row->exact)
    try_each(row, scale, 1, 0, 1, found);
  else
    try_each(row, scale, 1, 0, 0, found);
}

static void try_scales(const searched *row, const float *scale, int count, tried *found) {
  int n = 0;
  for (; n + AT_ONCE <= count; n += AT_ONCE) try_some(row, scale + n, found + n);
  for (; n < count; n++) try_one(row, scale + n, found + n);
}

/* As a stored scale can be. */
static float storable(const searched *row, float scale) {
  return row->job->bf16_scales ? to_bf16(scale) : scale;
}

/* Candidate n of formats.md. */
static float candidate(const searched *row, int n) {
  const int twenty_first = n < 21 ? n : 21;
  return storable(row, row->first * (float)((420.0 - 13.0 * twenty_first) / 420.0));
}

/* The first of the best scales; before: the best of those tried before, or NULL. */
static tried best_of(const tried *found, int count, const tried *before) {
  tried best = before ? *before : found[0];
  for (int n = 0; n < count; n++)
    if (found[n].gain > best.gain) best = found[n];
  return best;
}

/* Steps 1 and 2 of formats.md. */
static tried best_candidate(const searched *row) {
  float scale[CANDIDATES];
  tried found[CANDIDATES];
  for (int n = 0; n < CANDIDATES; n++) scale[n] = candidate(row, 3 * n);
  try_scales(row, scale, CANDIDATES, found);
  const tried best = best_of(found, CANDIDATES, NULL);
  int middle = 0;
  while (found[middle].gain != best.gain) middle++;
  for (int n = 0; n < 4; n++) scale[n] = candidate(row, 3 * middle + (n < 2 ? n - 2 : n - 1));
  try_scales(row, scale, 4, found);
  return best_of(found, 4, &best);
}

static float searched_scale(const searched *row) {
  if (row->amax < 0x1p-60f || row->amax > 0x1p60f) return row->first;
  tried best = best_candidate(row);
  for (int step = 0; step < 2 && best.square > 0; step++) {
    const double least_squares = best.product / best.square;
    const float scale = storable(row, (float)(least_squares / (double)row->job->format->units));
    if (scale < candidate(row, 21)) break;
    tried next;
    try_one(row, &scale, &next);
    if (!(next.gain > best.gain)) break;
    best = next;
  }
  return best.scale;
}

/* Whether weights have 11 bits at most: times the 7 of a code, no more than the 24 of binary32. */
INLINE int has_short_weights(const kt_matrix *m) {
  if (m->row_factor || m->col_factor) return 0;
  return m->round_to_bf16 || ((m->dtype == KT_BF16 || m->dtype == KT_F16) && !m->block_scale);
}

/* Replaces the scales of amax in job->rule, of KT_AUDIT_ROWS rows from `row` on. kept: whether
 * scratch has their values. */
static __attribute__((noinline)) void search_rows(const kt_audit_job *job, int64_t row, int kept) {
  const int64_t cols = job->source->cols;
  if (!kept) load_values(job, row);
  for (int64_t r = 0; r < KT_AUDIT_ROWS; r++) {
    float *const weight = values_at(job, r);
    for (int64_t c = 0; c < cols; c++) weight[c] = fabsf(weight[c]);
    for (int64_t g = 0; g < job->groups; g++) {
      const int64_t at = (row + r) * job->groups + g, col = g * job->group;
      const searched one = {.weight = weight + col,
                            .importance = job->importance ? job->importance + col : NULL,
                            .cols = job->group,
                            .amax = job->amax[at],
                            .first = job->rule[at],
                            .exact = has_short_weights(job->source),
                            .job = job};
      if (isfinite(one.amax)) job->rule[at] = searched_scale(&one);
    }
  }
}

#endif
