/* audit_search.h - the scale that KT_RULE_SEARCH gives, from docs/formats.md 3.6 alone. */
#ifndef KT_AUDIT_SEARCH_H
#define KT_AUDIT_SEARCH_H

#include "audit_source.h"

#include <math.h>

enum { SUMS = 16, SUMS_BLOCK = 512 };

/* A row or group: magnitudes of its weights, and what their squared errors count. */
typedef struct searched {
  const float *weight, *importance; /* [cols]; importance NULL: 1 */
  int64_t cols;
  float amax, first; /* the scale that amax makes, as it is stored */
  const kt_audit_job *job;
} searched;

/* A scale that was tried; gain: by how much it lowers the error of a row of zeros. */
typedef struct tried {
  float scale;
  double gain, product, square;
} tried;

INLINE float nearest_code(float weight, float inverse, float top) {
  const float y = weight * inverse;
  return ((y < top ? y : top) + 0x1.8p23f) - 0x1.8p23f;
}

/* Adds up the products and squares of a row's codes, in the order that formats.md prescribes. */
INLINE void add_codes(const searched *row, float inverse, const int weighted, double *product,
                      double *square) {
  double products[SUMS] = {0}, squares[SUMS] = {0};
  const float top = row->job->format->top;
  for (int64_t block = 0; block < row->cols; block += SUMS_BLOCK) {
    const int64_t end = least(block + SUMS_BLOCK, row->cols);
    float p[SUMS] = {0}, s[SUMS] = {0};
    for (int64_t k = block; k < end; k += SUMS)
      for (int i = 0; i < SUMS; i++) {
        const float w = row->weight[k + i], c = nearest_code(w, inverse, top);
        const float v = weighted ? row->importance[k + i] : 1.0f;
        p[i] += v * w * c;
        s[i] += v * (c * c);
      }
    for (int i = 0; i < SUMS; i++) products[i] += (double)p[i];
    for (int i = 0; i < SUMS; i++) squares[i] += (double)s[i];
  }
  *product = *square = 0;
  for (int i = 0; i < SUMS; i++) *product += products[i];
  for (int i = 0; i < SUMS; i++) *square += squares[i];
}

static __attribute__((noinline)) tried try_scale(const searched *row, float scale) {
  const float step = scale * row->job->format->units;
  tried found = {.scale = scale};
  if (row->importance)
    add_codes(row, 1.0f / step, 1, &found.product, &found.square);
  else
    add_codes(row, 1.0f / step, 0, &found.product, &found.square);
  found.gain = (double)step * (2.0 * found.product - (double)step * found.square);
  return found;
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

static float searched_scale(const searched *row) {
  if (row->amax < 0x1p-60f || row->amax > 0x1p60f) return row->first;
  tried best = try_scale(row, row->first);
  int middle = 0;
  for (int n = 3; n <= 21; n += 3) {
    const tried next = try_scale(row, candidate(row, n));
    if (next.gain > best.gain) best = next, middle = n;
  }
  for (int n = middle - 2; n <= middle + 2; n++) {
    if (n == middle) continue;
    const tried next = try_scale(row, candidate(row, n));
    if (next.gain > best.gain) best = next;
  }
  for (int step = 0; step < 2 && best.square > 0; step++) {
    const double least_squares = best.product / best.square;
    const float scale = storable(row, (float)(least_squares / (double)row->job->format->units));
    if (scale < candidate(row, 21)) break;
    const tried next = try_scale(row, scale);
    if (!(next.gain > best.gain)) break;
    best = next;
  }
  return best.scale;
}

/* The magnitudes of KT_AUDIT_ROWS rows from `row` on, in scratch. */
INLINE void load_magnitudes(const kt_audit_job *job, int64_t row, int64_t pitch) {
  const kt_matrix *const m = job->source;
  const int64_t block = is_across(m) ? KT_AUDIT_GATHERED : KT_AUDIT_BLOCK;
  const int64_t in_strip = is_across(m) ? row % (2 * KT_AUDIT_ROWS) : 0;
  for (int64_t col = 0, width; col < m->cols; col += width) {
    uint8_t room[ROOM_BYTES];
    width = least(block, m->cols - col);
    const stored from = stored_from(m, row - in_strip, col, width, room);
    for (int64_t r = 0; r < KT_AUDIT_ROWS; r++) {
      float *const to = job->scratch + r * pitch + col;
      source_values(m, stored_on(from, in_strip + r), row + r, col, width, to);
      for (int64_t c = 0; c < width; c++) to[c] = fabsf(to[c]);
    }
  }
}

/* Replaces the scales of amax in job->rule, of KT_AUDIT_ROWS rows from `row` on, by those of the
 * search. */
static __attribute__((noinline)) void search_rows(const kt_audit_job *job, int64_t row) {
  const int64_t pitch = job->source->cols + 16;
  load_magnitudes(job, row, pitch);
  for (int64_t r = 0; r < KT_AUDIT_ROWS; r++)
    for (int64_t g = 0; g < job->groups; g++) {
      const int64_t at = (row + r) * job->groups + g, col = g * job->group;
      const searched one = {.weight = job->scratch + r * pitch + col,
                            .importance = job->importance ? job->importance + col : NULL,
                            .cols = job->group,
                            .amax = job->amax[at],
                            .first = job->rule[at],
                            .job = job};
      if (isfinite(one.amax)) job->rule[at] = searched_scale(&one);
    }
}

#endif
