/* packed_fixed.h - the scales that KT_RULE_SEARCH gives whole rows, from docs/formats.md 3.8 alone.
 */
#ifndef KT_AUDIT_PACKED_FIXED_H
#define KT_AUDIT_PACKED_FIXED_H

#include "packed_values.h"

#include <math.h>

/* A level may have its own: sums of integers have no order. `measured`: adds to *of. */
#ifndef KT_AUDIT_OWN_INTEGERS
INLINE void add_weights(const void *weights, int64_t cols, const int halves, float factor,
                        int16_t *to, const int measured, moments *of) {
  int64_t ones = 0, squares = 0;
  for (int64_t c = 0; c < cols; c++) {
    const float w = halves ? from_bits((uint32_t)half_at((const uint8_t *)weights + 2 * c) << 16)
                           : ((const float *)weights)[c];
    const uint32_t rounded = bits_of(fabsf(w) * factor + 0x1.8p23f) & 0x7fffu;
    to[c] = (int16_t)rounded;
    ones += rounded;
    squares += (rounded >> 5) * (rounded >> 5);
  }
  if (!measured) return;
  of->ones += ones;
  of->squares += squares;
}
#endif

/* ---- Where the search of INT4 begins ------------------------------------------- */

/* The polynomial's coefficients in 256ths. */
static const int32_t coefficients[20] = {7483,   32906,  29543,  -140847, 237671,  -229755, -145159,
                                         -83867, 345391, 125573, 55308,   -248325, -317419, 141048,
                                         463219, 81159,  70596,  -249442, -255020, 39023};

/* y + the next coefficient times x. */
INLINE void add_term(const int32_t **next, const double *x, double *y) {
  const double factor = (double)*(*next)++ / 256.0;
  for (int r = 0; r < KT_AUDIT_ROWS; r++) y[r] += factor * x[r];
}

INLINE void multiply_rows(const double *a, const double *b, double *to) {
  for (int r = 0; r < KT_AUDIT_ROWS; r++) to[r] = a[r] * b[r];
}

/* The number of the first step of each row. */
static void first_steps(int64_t cols, const moments *of, int *number) {
  double a[3][KT_AUDIT_ROWS], y[KT_AUDIT_ROWS], two[KT_AUDIT_ROWS], three[KT_AUDIT_ROWS];
  const double length = (double)cols;
  for (int r = 0; r < KT_AUDIT_ROWS; r++) {
    const double rms = sqrt(1024.0 * (double)of[r].squares / length);
    a[0][r] = rms / 32767.0;
    a[1][r] = (double)of[r].ones / length / rms;
    a[2][r] = sqrt(1.0 / sqrt(length));
    y[r] = (double)coefficients[0] / 256.0;
  }
  const int32_t *next = coefficients + 1;
  for (int i = 0; i < 3; i++) add_term(&next, a[i], y);
  for (int i = 0; i < 3; i++)
    for (int j = i; j < 3; j++) {
      multiply_rows(a[i], a[j], two);
      add_term(&next, two, y);
    }
  for (int i = 0; i < 3; i++)
    for (int j = i; j < 3; j++) {
      multiply_rows(a[i], a[j], two);
      for (int k = j; k < 3; k++) {
        multiply_rows(two, a[k], three);
        add_term(&next, three, y);
      }
    }
  for (int r = 0; r < KT_AUDIT_ROWS; r++) {
    const double least_squares = floor(1.244 * y[r] + 0.5) - 2.0;
    number[r] = !(least_squares > -2.0) ? -2 : least_squares > 27.0 ? 27 : (int)least_squares;
  }
}

/* ---- The search ------------------------------------------------------------------ */

/* A row, and the best step that was found for it. */
typedef struct fixed_row {
  integer_row of;
  int best; /* its number, or place */
  int64_t gain;
  integer_sums sums;
} fixed_row;

INLINE void consider(fixed_row *row, int number, int step, integer_sums sums) {
  const int64_t gain = 2 * step * sums.product - (int64_t)step * step * sums.square;
  if (gain <= row->gain) return;
  row->best = number, row->gain = gain, row->sums = sums;
}

static void consider_two(const kt_audit_job *job, fixed_row *row, int a, int b) {
  const int step[2] = {job->steps[a + 2], job->steps[b + 2]};
  integer_sums sums[2];
  job->sums(&row->of, 4, step, 2, sums);
  consider(row, a, step[0], sums[0]);
  consider(row, b, step[1], sums[1]);
}

/* From the first three of `found`, which are of steps first, first + 2 and first + 4, on to smaller
 * or larger ones; the fourth is of step 0. */
static void climb(const kt_audit_job *job, fixed_row *row, int first, const integer_sums *found) {
  int ends[2] = {first, first + 4};
  for (int i = 0; i < 3; i++) consider(row, first + 2 * i, job->steps[first + 2 * i + 2], found[i]);
  while ((row->best == ends[0] && row->best > -1) || (row->best == ends[1] && row->best < 30)) {
    const int side = row->best == ends[1], by = side ? 2 : -2, last = side ? 31 : -2;
    const int beyond = row->best + 2 * by, inside = side ? beyond < last : beyond > last;
    ends[side] = inside ? beyond : last;
    consider_two(job, row, row->best + by, ends[side]);
  }
  consider(row, 0, job->steps[2], found[3]);
}

static void search_int4_rows(const kt_audit_job *job, const moments *of, fixed_row *row) {
  int first[KT_AUDIT_ROWS];
  integer_sums found[KT_AUDIT_ROWS][4];
  first_steps(job->source->cols, of, first);
  for (int r = 0; r < KT_AUDIT_ROWS; r++) {
    const int *const from = job->steps + first[r] + 2;
    const int step[4] = {from[0], from[2], from[4], job->steps[2]};
    job->sums(&row[r].of, 4, step, 4, found[r]);
  }
  for (int r = 0; r < KT_AUDIT_ROWS; r++) climb(job, row + r, first[r], found[r]);
  for (int r = 0; r < KT_AUDIT_ROWS; r++) {
    const int n = row[r].best;
    consider_two(job, row + r, n == -2 ? n : n - 1, n == 31 ? n : n + 1);
  }
}

static void search_int8_row(const kt_audit_job *job, fixed_row *row) {
  static const int steps[4][4] = {
      {261, 258, 254, 250}, {265, 263, 256, 247}, {268, 259, 252, 244}, {246, 241, 234, 225}};
  const int is_short = row->of.cols < 512, is_long = row->of.cols >= 8192;
  const int wanted[4] = {1, is_short, is_short, is_long};
  for (int set = 0; set < 4; set++) {
    integer_sums found[4];
    if (!wanted[set]) continue;
    job->sums(&row->of, 8, steps[set], 4, found);
    for (int i = 0; i < 4; i++) consider(row, 4 * set + i, steps[set][i], found[i]);
  }
}

INLINE int is_fixed_row(float amax) { return amax >= 0x1p-60f && amax <= 0x1p60f; }

/* Whether rows are stored as bf16, and nothing changes them. */
INLINE int is_plain_bf16(const kt_matrix *m) {
  if (m->dtype != KT_BF16 || m->col_stride != 1) return 0;
  return !m->block_scale && !m->row_factor && !m->col_factor;
}

/* Integers of a row: sums of 4096 columns fit 32 bits. halves: of bf16, else of binary32. */
INLINE void row_integers(const void *weights, int64_t cols, const int halves, float factor,
                         int16_t *to, const int measured, moments *of) {
  const int64_t size = halves ? 2 : 4;
  for (int64_t col = 0; col < cols; col += 4096)
    add_weights((const uint8_t *)weights + col * size, least(4096, cols - col), halves, factor,
                to + col, measured, of);
}

/* Integers of KT_AUDIT_ROWS rows from `row` on, behind their values in scratch; of INT4, moments.
 * kept: whether scratch has the values. */
static int16_t *load_integers(const kt_audit_job *job, int64_t row, int kept, moments *of) {
  const kt_matrix *const m = job->source;
  const int halves = is_plain_bf16(m), is_int4 = job->format->planes == 2;
  const int64_t cols = m->cols, pitch = scratch_pitch(m);
  int16_t *const integers = (int16_t *)(void *)values_at(job, KT_AUDIT_ROWS);
  if (!halves && !kept) load_values(job, row);
  for (int64_t r = 0; r < KT_AUDIT_ROWS; r++) {
    const float amax = job->amax[row + r], factor = is_fixed_row(amax) ? 32767.0f / amax : 0.0f;
    int16_t *const to = integers + r * pitch;
    const float *const values = values_at(job, r);
    const uint8_t *const bf16 = (const uint8_t *)m->data + (row + r) * m->row_stride * 2;
    if (halves && is_int4)
      row_integers(bf16, cols, 1, factor, to, 1, of + r);
    else if (halves)
      row_integers(bf16, cols, 1, factor, to, 0, of + r);
    else if (is_int4)
      row_integers(values, cols, 0, factor, to, 1, of + r);
    else
      row_integers(values, cols, 0, factor, to, 0, of + r);
  }
  return integers;
}

/* Replaces the scales of amax in job->rule, of KT_AUDIT_ROWS rows from `row` on. */
static __attribute__((noinline)) void search_fixed_rows(const kt_audit_job *job, int64_t row,
                                                        int kept) {
  const int64_t cols = job->source->cols, pitch = scratch_pitch(job->source);
  moments of[KT_AUDIT_ROWS] = {{0, 0}};
  fixed_row rows[KT_AUDIT_ROWS];
  const int16_t *const integers = load_integers(job, row, kept, of);
  for (int r = 0; r < KT_AUDIT_ROWS; r++)
    rows[r] = (fixed_row){{integers + r * pitch, cols, of[r].ones}, 0, INT64_MIN, {0, 0}};
  if (job->format->planes == 2)
    search_int4_rows(job, of, rows);
  else
    for (int r = 0; r < KT_AUDIT_ROWS; r++) search_int8_row(job, rows + r);
  for (int r = 0; r < KT_AUDIT_ROWS; r++) {
    const double mean = (double)rows[r].sums.product / (double)rows[r].sums.square;
    const float amax = job->amax[row + r];
    if (is_fixed_row(amax))
      job->rule[row + r] = (float)(mean * ((double)amax / 32767.0)) / job->format->units;
  }
}

#endif
