/* fixed.h - KT_RULE_SEARCH of whole rows without importance, in fixed point (docs/formats.md, 3.8).
 *
 * Magnitudes become integers, and all sums are exact: they have no order, so that every level gives
 * the same bits. The search is the same for every level and takes some rows at a time; a level
 * provides the two loops over the columns of a row. */
#ifndef KT_FIXED_H
#define KT_FIXED_H

#include "../format/format.h"
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "rounding.h"

#include <math.h>
#include <string.h>

/* The first steps are found by products and sums in binary64, none of which is fused. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

enum {
  KT_FIXED_ROWS = 16,      /* rows that are searched together, at most */
  KT_FIXED_MOST = 32767,   /* what the largest magnitude of a row becomes */
  KT_FIXED_FIRST = -2,     /* the largest step of INT4, by its number, */
  KT_FIXED_LAST = 31,      /* and the smallest */
  KT_FIXED_AT_ONCE = 4,    /* steps that are tried in one pass over a row */
  KT_FIXED_SHORT = 512,    /* rows of INT8 with fewer columns have eight more steps, */
  KT_FIXED_LONG = 8192,    /* those with so many have four */
  KT_FIXED_BLOCK_4 = 8192, /* columns whose sums fit 32 bits: of INT4, */
  KT_FIXED_BLOCK_8 = 2048, /* of INT8 in each of 4 lanes, */
  KT_FIXED_BLOCK = 4096    /* and of kt_fixed_moments */
};

/* Of magnitudes m as integers, and of their codes c under some step: */
typedef struct kt_fixed_moments {
  int64_t sum, square; /* m; (m >> 5)^2 */
} kt_fixed_moments;

typedef struct kt_fixed_sums {
  int64_t product, square; /* m * c; c^2 */
} kt_fixed_sums;

/* A step between codes is an integer; its inverse is 2^26 (INT4) or 2^23 (INT8) over it. So y, the
 * upper half of m * inverse, is m in steps with `shift` bits of a fraction. Its code, the integer
 * next to y, halves down, `top` at most, is top - (max(bound - y, 0) >> shift). */
typedef struct kt_fixed_levels {
  int shift, top, bound; /* bound: (top + 1/2) << shift */
} kt_fixed_levels;

KT_INLINE kt_fixed_levels kt_fixed_levels_of(const int bits) {
  return bits == 4 ? (kt_fixed_levels){10, 7, 7680} : (kt_fixed_levels){7, 127, 16320};
}

/* Magnitudes as integers: RNE(|w| * factor), in any order. cols % 64 == 0. moments: NULL of INT8,
 * which needs none. */
typedef void kt_fixed_row_fn(const uint8_t *row, int64_t cols, int form, float factor, int16_t *to,
                             kt_fixed_moments *moments);

/* A row of integers, and of INT4 their sum. */
typedef struct kt_fixed_row {
  const int16_t *m;
  int64_t cols, sum;
} kt_fixed_row;

/* Sums for `count` steps, 2 or 4. */
typedef void kt_fixed_sums_fn(const kt_fixed_row *row, int bits, const uint16_t *inverse, int count,
                              kt_fixed_sums *sums);

kt_fixed_sums_fn kt_fixed_sums_scalar, kt_fixed_sums_avx2, kt_fixed_sums_avx512, kt_fixed_sums_vnni,
    kt_fixed_sums_neon;
kt_fixed_sums_fn *kt_fixed_sums_best(void); /* that of the level in use */

/* Whether rows are searched here: else by search.h. */
static inline int kt_is_fixed(const kt_layout *layout, const kt_choice *choice) {
  return choice->rule == KT_RULE_SEARCH && !layout->group && !choice->importance;
}

/* Rows to be searched; room: `stride` integers for each. */
typedef struct kt_fixed_rows {
  const uint8_t *data;
  int64_t row_size, cols, stride;
  int form, count;
  int16_t *room;
} kt_fixed_rows;

/* The best step of a row so far. */
typedef struct kt_fixed_best {
  int64_t gain; /* by how much it lowers the sum of m^2 */
  kt_fixed_sums sums;
  int number;
} kt_fixed_best;

static const uint16_t kt_fixed_step_4[KT_FIXED_LAST - KT_FIXED_FIRST + 1] = {
    5063, 4868, 4681, 4501, 4328, 4161, 4001, 3847, 3699, 3557, 3420, 3289,
    3162, 3041, 2924, 2811, 2703, 2599, 2499, 2403, 2311, 2222, 2136, 2054,
    1975, 1899, 1826, 1756, 1688, 1623, 1561, 1501, 1443, 1388};
static const uint16_t kt_fixed_inverse_4[KT_FIXED_LAST - KT_FIXED_FIRST + 1] = {
    13255, 13786, 14336, 14910, 15506, 16128, 16773, 17444, 18142, 18867, 19622, 20404,
    21224, 22068, 22951, 23874, 24828, 25821, 26854, 27927, 29039, 30202, 31418, 32672,
    33979, 35339, 36752, 38217, 39756, 41349, 42991, 44709, 46506, 48349};

/* Of INT8: four for every row; eight for short ones, whose errors have many minima; four for long
 * ones, which lose more by large steps than by cutting. */
static const uint16_t kt_fixed_step_8[] = {261, 258, 254, 250, 265, 263, 256, 247,
                                           268, 259, 252, 244, 246, 241, 234, 225};
static const uint16_t kt_fixed_inverse_8[] = {32140, 32514, 33026, 33554, 31655, 31896,
                                              32768, 33962, 31301, 32388, 33288, 34380,
                                              34100, 34808, 35849, 37283};

/* Gains are exact: of INT4, below 2^32 times the columns. */
KT_INLINE void kt_fixed_try(kt_fixed_best *best, int64_t step, kt_fixed_sums sums, int number) {
  const int64_t gain = step * (2 * sums.product - step * sums.square);
  if (gain > best->gain) *best = (kt_fixed_best){gain, sums, number};
}

/* Numbers of the first steps to be tried, from moments: what a polynomial says is the best one,
 * less 2. Row by row in the innermost loops, which become vectors. */
KT_INLINE void kt_fixed_predict(int64_t cols, int rows, const kt_fixed_moments *moments,
                                int *first) {
  static const double c[20] = {7483 / 256.0,    32906 / 256.0,   29543 / 256.0,   -140847 / 256.0,
                               237671 / 256.0,  -229755 / 256.0, -145159 / 256.0, -83867 / 256.0,
                               345391 / 256.0,  125573 / 256.0,  55308 / 256.0,   -248325 / 256.0,
                               -317419 / 256.0, 141048 / 256.0,  463219 / 256.0,  81159 / 256.0,
                               70596 / 256.0,   -249442 / 256.0, -255020 / 256.0, 39023 / 256.0};
  const double count = (double)cols;
  double x[3][KT_FIXED_ROWS], y[KT_FIXED_ROWS];
  for (int r = 0; r < rows; r++) {
    const double rms = sqrt(1024.0 * (double)moments[r].square / count);
    x[0][r] = rms / (double)KT_FIXED_MOST;
    x[1][r] = (double)moments[r].sum / count / rms;
    x[2][r] = sqrt(1 / sqrt(count));
    y[r] = c[0];
  }
  for (int i = 0; i < 3; i++)
    for (int r = 0; r < rows; r++) y[r] += c[1 + i] * x[i][r];
  for (int i = 0, n = 4; i < 3; i++)
    for (int j = i; j < 3; j++, n++)
      for (int r = 0; r < rows; r++) y[r] += c[n] * (x[i][r] * x[j][r]);
  for (int i = 0, n = 10; i < 3; i++)
    for (int j = i; j < 3; j++)
      for (int k = j; k < 3; k++, n++)
        for (int r = 0; r < rows; r++) y[r] += c[n] * (x[i][r] * x[j][r] * x[k][r]);
  for (int r = 0; r < rows; r++) {
    const double least = (double)KT_FIXED_FIRST, most = (double)(KT_FIXED_LAST - 4);
    const double number = floor(1.244 * y[r] + 0.5) - 2;
    const double above = number >= least ? number : least; /* NaN: the first */
    first[r] = (int)(above < most ? above : most);
  }
}

/* Tries steps a and b of INT4. */
KT_INLINE void kt_fixed_try_pair(const kt_fixed_row *row, int a, int b, kt_fixed_best *best,
                                 kt_fixed_sums_fn *sum) {
  const uint16_t *const step = kt_fixed_step_4 - KT_FIXED_FIRST;
  const uint16_t *const inverses = kt_fixed_inverse_4 - KT_FIXED_FIRST;
  const uint16_t inverse[2] = {inverses[a], inverses[b]};
  kt_fixed_sums sums[2];
  sum(row, 4, inverse, 2, sums);
  kt_fixed_try(best, step[a], sums[0], a);
  kt_fixed_try(best, step[b], sums[1], b);
}

/* The best of steps `low`, low + 2, low + 4, with these sums, and of more steps beyond that as long
 * as the best is the outermost. */
KT_INLINE kt_fixed_best kt_fixed_climb(const kt_fixed_row *row, int low, const kt_fixed_sums *sums,
                                       kt_fixed_sums_fn *sum) {
  kt_fixed_best best = {.gain = INT64_MIN};
  int high = low + 4;
  for (int i = 0; i < 3; i++)
    kt_fixed_try(&best, kt_fixed_step_4[low + 2 * i - KT_FIXED_FIRST], sums[i], low + 2 * i);
  for (;;) {
    if (best.number == low && low > KT_FIXED_FIRST + 1) {
      const int next = low - 2;
      low = low - 4 < KT_FIXED_FIRST ? KT_FIXED_FIRST : low - 4;
      kt_fixed_try_pair(row, next, low, &best, sum);
    } else if (best.number == high && high < KT_FIXED_LAST - 1) {
      const int next = high + 2;
      high = high + 4 > KT_FIXED_LAST ? KT_FIXED_LAST : high + 4;
      kt_fixed_try_pair(row, next, high, &best, sum);
    } else {
      return best;
    }
  }
}

KT_INLINE void kt_fixed_search_4(const kt_fixed_row *row, int rows, const kt_fixed_moments *moments,
                                 kt_fixed_best *best, kt_fixed_sums_fn *sum) {
  const uint16_t *const inverses = kt_fixed_inverse_4 - KT_FIXED_FIRST;
  int first[KT_FIXED_ROWS];
  kt_fixed_sums sums[KT_FIXED_ROWS][KT_FIXED_AT_ONCE];
  kt_fixed_predict(row->cols, rows, moments, first);
  for (int r = 0; r < rows; r++) {
    const int n = first[r];
    const uint16_t inverse[KT_FIXED_AT_ONCE] = {inverses[n], inverses[n + 2], inverses[n + 4],
                                                inverses[0]};
    sum(row + r, 4, inverse, KT_FIXED_AT_ONCE, sums[r]);
  }
  for (int r = 0; r < rows; r++) {
    best[r] = kt_fixed_climb(row + r, first[r], sums[r], sum);
    kt_fixed_try(best + r, kt_fixed_step_4[0 - KT_FIXED_FIRST], sums[r][3], 0);
  }
  for (int r = 0; r < rows; r++) {
    const int n = best[r].number, before = n > KT_FIXED_FIRST ? n - 1 : n;
    kt_fixed_try_pair(row + r, before, n < KT_FIXED_LAST ? n + 1 : n, best + r, sum);
  }
}

/* Tries four steps of INT8. */
KT_INLINE void kt_fixed_try_bytes(const kt_fixed_row *row, int from, kt_fixed_best *best,
                                  kt_fixed_sums_fn *sum) {
  kt_fixed_sums sums[KT_FIXED_AT_ONCE];
  sum(row, 8, kt_fixed_inverse_8 + from, KT_FIXED_AT_ONCE, sums);
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++)
    kt_fixed_try(best, kt_fixed_step_8[from + i], sums[i], from + i);
}

KT_INLINE kt_fixed_best kt_fixed_search_8(const kt_fixed_row *row, kt_fixed_sums_fn *sum) {
  kt_fixed_best best = {.gain = INT64_MIN};
  kt_fixed_try_bytes(row, 0, &best, sum);
  if (row->cols < KT_FIXED_SHORT) {
    kt_fixed_try_bytes(row, 4, &best, sum);
    kt_fixed_try_bytes(row, 8, &best, sum);
  }
  if (row->cols >= KT_FIXED_LONG) kt_fixed_try_bytes(row, 12, &best, sum);
  return best;
}

/* Scales of rows whose largest magnitudes are `amax`. Rows beyond 2^-60 .. 2^60 have the scale of
 * that. */
KT_INLINE void kt_fixed_scales(const kt_weight_format *format, const kt_fixed_rows *rows,
                               const float *amax, float *scale, kt_fixed_row_fn *integers,
                               kt_fixed_sums_fn *sum) {
  kt_fixed_moments moments[KT_FIXED_ROWS] = {{0}};
  kt_fixed_row row[KT_FIXED_ROWS];
  kt_fixed_best best[KT_FIXED_ROWS];
  const int is_int4 = format->max_level == 7;
  for (int r = 0; r < rows->count; r++) {
    const int usual = amax[r] >= 0x1p-60f && amax[r] <= 0x1p60f;
    int16_t *const to = rows->room + r * rows->stride;
    integers(rows->data + r * rows->row_size, rows->cols, rows->form,
             usual ? (float)KT_FIXED_MOST / amax[r] : 0.0f, to, is_int4 ? moments + r : NULL);
    row[r] = (kt_fixed_row){to, rows->cols, moments[r].sum};
  }
  if (is_int4)
    kt_fixed_search_4(row, rows->count, moments, best, sum);
  else
    for (int r = 0; r < rows->count; r++) best[r] = kt_fixed_search_8(row + r, sum);
  for (int r = 0; r < rows->count; r++) {
    const double unit = (double)amax[r] / (double)KT_FIXED_MOST;
    const double steps = (double)best[r].sums.product / (double)best[r].sums.square;
    scale[r] = amax[r] >= 0x1p-60f && amax[r] <= 0x1p60f
                   ? (float)(steps * unit) / (float)format->scale_units
                   : format->scale(amax[r]);
  }
}

/* The reference of every level. */
KT_INLINE void kt_fixed_row_scalar(const uint8_t *row, int64_t cols, int form, float factor,
                                   int16_t *to, kt_fixed_moments *moments) {
  int64_t sum = 0, square = 0;
  (void)form; /* binary32 */
  for (int64_t k = 0; k < cols; k++) {
    float w;
    memcpy(&w, row + 4 * k, sizeof w);
    const int32_t m = kt_round_even(fabsf(w) * factor), part = m >> 5;
    to[k] = (int16_t)m;
    sum += m;
    square += part * part;
  }
  if (moments) *moments = (kt_fixed_moments){sum, square};
}

#endif
