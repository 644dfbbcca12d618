/* encode_search.h - scales of INT4 and INT8 by the search (docs/formats.md, 10.2).
 *
 * Groups are the lanes of vectors, of GCC's own kind: one loop for every level, in which a group's
 * sums have the order of its columns. A level says how many lanes its vectors have, and may have
 * instructions for what GCC's operators lack. Included by encode_loop.h behind its rules. */
#ifndef KT_ENCODE_SEARCH_H
#define KT_ENCODE_SEARCH_H

#include "../simd/unroll.h"

#ifndef KT_ENCODE_LANES
#define KT_ENCODE_LANES 8
/* No functions: the scalar level has no registers to return such vectors in. */
#define LESSER(a, b) WHERE((a) < (b), a, b)
#define GREATER(a, b) WHERE((a) > (b), a, b)
#define WHERE(which, a, b) ((floats)(((which) & (masks)(a)) | (~(which) & (masks)(b))))
#define FUSED(a, b, c) ((a) * (b) + (c))
#define own_columns(at, from, cols, panel) 0
#endif

enum {
  LANES = KT_ENCODE_LANES,
  TRIED = 8,           /* scales that are tried one after the other, twice */
  AT_ONCE = LANES / 8, /* in a pass: as many as registers hold the sums of */
  SUMS = 4,
  SEARCH_BLOCK = 512, /* columns whose sums are binary32 */
  SEARCH_LAST = 42    /* number of the smallest candidate */
};
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t masks __attribute__((vector_size(4 * LANES)));

/* Of groups: a scale for each, and its number. */
typedef struct candidates {
  float divisor[LANES];
  int32_t number[LANES];
} candidates;

/* Of weights w with codes c: sums of w * c and of c * c. */
typedef struct code_sums {
  double product[LANES], square[LANES];
} code_sums;

/* The best scales of groups so far; gain: by how much one lowers the sum of squared weights. */
typedef struct search {
  candidates best;
  code_sums sums;
  double gain[LANES];
} search;

/* Groups to be searched, of `count` columns each. */
typedef struct search_groups {
  const float *at[LANES];
  int64_t count;
  float top;
  int half;
  int exact; /* weights have 11 bits at most: w * c is not rounded */
} search_groups;

/* SEARCH_BLOCK columns at most, by column: the groups side by side. */
typedef struct search_panel {
  _Alignas(64) float column[SEARCH_BLOCK][LANES];
} search_panel;

/* Columns from `from` on, and zeros up to a multiple of SUMS; how many. */
INLINE int64_t fill_panel(const search_groups *groups, int64_t from, search_panel *panel) {
  const int64_t left = groups->count - from, count = left < SEARCH_BLOCK ? left : SEARCH_BLOCK;
  for (int64_t k = own_columns(groups->at, from, count, panel->column[0]); k < count; k++) {
    KT_LOOP
    for (int i = 0; i < LANES; i++) panel->column[k][i] = groups->at[i][from + k];
  }
  const int64_t whole = (count + SUMS - 1) / SUMS * SUMS;
  for (int64_t k = count; k < whole; k++) {
    KT_LOOP
    for (int i = 0; i < LANES; i++) panel->column[k][i] = 0;
  }
  return whole;
}

/* Sums of a panel's columns under AT_ONCE scales. Those of squares are exact: in any order. */
INLINE void add_panel(const search_panel *panel, int64_t cols, const float (*inverse)[LANES],
                      float top, const int exact, code_sums *sums) {
  const floats above = top - (floats){0}, below = -1.0f - above, magic = 12582912.0f - (floats){0};
  floats by[AT_ONCE], product[AT_ONCE][SUMS], square[AT_ONCE][2];
  KT_UNROLL(2) for (int n = 0; n < AT_ONCE; n++) {
    memcpy(&by[n], inverse[n], sizeof by[n]);
    KT_UNROLL(4) for (int l = 0; l < SUMS; l++) product[n][l] = square[n][l % 2] = (floats){0};
  }
  for (int64_t k = 0; k < cols; k += SUMS) KT_UNROLL(4) for (int l = 0; l < SUMS; l++) {
      floats w;
      memcpy(&w, panel->column[k + l], sizeof w);
      KT_UNROLL(2) for (int n = 0; n < AT_ONCE; n++) {
        const floats y = by[n] * w, least = LESSER(y, above), within = GREATER(least, below);
        const floats code = (within + magic) - magic;
        product[n][l] = exact ? FUSED(code, w, product[n][l]) : product[n][l] + code * w;
        square[n][l % 2] = FUSED(code, code, square[n][l % 2]);
      }
    }
  for (int n = 0; n < AT_ONCE; n++) {
    const floats p = (product[n][0] + product[n][1]) + (product[n][2] + product[n][3]);
    const floats s = square[n][0] + square[n][1];
    float products[LANES], squares[LANES];
    memcpy(products, &p, sizeof products);
    memcpy(squares, &s, sizeof squares);
    KT_LOOP
    for (int i = 0; i < LANES; i++) sums[n].product[i] += (double)products[i];
    KT_LOOP
    for (int i = 0; i < LANES; i++) sums[n].square[i] += (double)squares[i];
  }
}

/* Functions of their own, so that sums get all registers. */
static __attribute__((noinline)) void add_exact(const search_panel *panel, int64_t cols,
                                                const float (*inverse)[LANES], float top,
                                                code_sums *sums) {
  add_panel(panel, cols, inverse, top, 1, sums);
}

static __attribute__((noinline)) void add_rounded(const search_panel *panel, int64_t cols,
                                                  const float (*inverse)[LANES], float top,
                                                  code_sums *sums) {
  add_panel(panel, cols, inverse, top, 0, sums);
}

/* A scale that is better than all before becomes the best of its group. No branches: loops over
 * groups become vectors. */
INLINE void keep_better(search *restrict s, const candidates *restrict tried,
                        const code_sums *restrict sums) {
  int64_t better[LANES];
  int32_t narrow[LANES];
  KT_LOOP
  for (int i = 0; i < LANES; i++) {
    const double d = (double)tried->divisor[i];
    const double gain = d * (2.0 * sums->product[i] - d * sums->square[i]);
    const int is_better = gain > s->gain[i];
    s->gain[i] = is_better ? gain : s->gain[i];
    s->sums.product[i] = is_better ? sums->product[i] : s->sums.product[i];
    s->sums.square[i] = is_better ? sums->square[i] : s->sums.square[i];
    better[i] = is_better ? -1 : 0;
  }
  KT_LOOP
  for (int i = 0; i < LANES; i++) narrow[i] = (int32_t)better[i];
  KT_LOOP
  for (int i = 0; i < LANES; i++) {
    s->best.divisor[i] = narrow[i] ? tried->divisor[i] : s->best.divisor[i];
    s->best.number[i] = narrow[i] ? tried->number[i] : s->best.number[i];
  }
}

/* Tries scales. The panel has the groups' first columns, unless they are more than it holds. */
INLINE void try_scales(search *s, const search_groups *groups, const candidates *tried,
                       search_panel *panel) {
  float inverse[TRIED][LANES];
  code_sums sums[TRIED];
  for (int n = 0; n < TRIED; n++) {
    KT_LOOP
    for (int i = 0; i < LANES; i++) inverse[n][i] = 1.0f / tried[n].divisor[i];
    KT_LOOP
    for (int i = 0; i < LANES; i++) sums[n].product[i] = sums[n].square[i] = 0;
  }
  for (int64_t from = 0; from < groups->count; from += SEARCH_BLOCK) {
    const int64_t whole = (groups->count + SUMS - 1) / SUMS * SUMS;
    const int64_t cols = groups->count > SEARCH_BLOCK ? fill_panel(groups, from, panel) : whole;
    for (int n = 0; n < TRIED; n += AT_ONCE)
      (groups->exact ? add_exact : add_rounded)(panel, cols, inverse + n, groups->top, sums + n);
  }
  for (int n = 0; n < TRIED; n++) keep_better(s, tried + n, sums + n);
}

/* Of a number > 0: the nearest of the dtype of scales. */
INLINE float narrowed(float value, const int half) {
  if (!half) return kt_float(rounded_bits(kt_bits(value), 0));
  const float normal = kt_float(rounded_bits(kt_bits(value), 1));
  const float small = ((value * 0x1p24f + 12582912.0f) - 12582912.0f) * 0x1p-24f;
  const float found = value < 0x1p-14f ? small : normal;
  return found < 65536.0f ? found : 65536.0f; /* stands for infinity */
}

/* Candidates of these numbers: from 1.06 (n = -4) down to 0.35 (n = 42) of the first scale. */
INLINE void set_candidates(candidates *tried, const float *first, const int half) {
  KT_LOOP
  for (int i = 0; i < LANES; i++) {
    const float by = (float)(840 - 13 * tried->number[i]) / 840.0f;
    const float found = narrowed(first[i] * by, half);
    tried->divisor[i] = tried->number[i] ? found : first[i];
  }
}

/* The scales whose nearest codes have the smallest squared error of those that are tried, the first
 * of which are those of the largest magnitudes. */
INLINE void search_scales(const search_groups *groups, const float *first, const int half,
                          search_panel *panel, search *s) {
  static const int coarse[TRIED] = {0, 6, 12, 18, 24, 30, 36, SEARCH_LAST};
  static const int step[TRIED - 1] = {-4, -2, -1, 1, 2, 3, 4};
  candidates tried[TRIED];
  for (int n = 0; n < TRIED; n++) {
    KT_LOOP
    for (int i = 0; i < LANES; i++) tried[n].number[i] = coarse[n];
    set_candidates(tried + n, first, half);
  }
  const candidates last = tried[TRIED - 1];
  *s = (search){.best = tried[0]};
  KT_LOOP
  for (int i = 0; i < LANES; i++) s->gain[i] = -INFINITY;
  try_scales(s, groups, tried, panel);
  for (int n = 0; n < TRIED - 1; n++) {
    KT_LOOP
    for (int i = 0; i < LANES; i++) {
      const int number = s->best.number[i] + step[n];
      tried[n].number[i] = number < SEARCH_LAST ? number : SEARCH_LAST;
    }
    set_candidates(tried + n, first, half);
  }
  tried[TRIED - 1] = s->best;
  KT_LOOP
  for (int i = 0; i < LANES; i++) {
    const float squares = narrowed((float)(s->sums.product[i] / s->sums.square[i]), half);
    const int fits = (squares >= last.divisor[i]) & (squares <= 1.25f * first[i]);
    tried[TRIED - 1].divisor[i] = fits ? squares : s->best.divisor[i];
  }
  try_scales(s, groups, tried, panel);
}

/* Scales of groups, as the numbers that they are. Of those whose largest weight is beyond
 * 2^-10 .. 2^60 (binary16), or 2^-60 .. 2^60, only the first is tried. Bits of the largest weight.
 */
static __attribute__((noinline)) uint32_t searched_scales(const search_groups *groups, int bits,
                                                          float *divisor) {
  const float half_range = bits == 4 ? 7.5f : 127.5f;
  const int half = groups->half;
  search_panel panel;
  int32_t most[LANES] = {0}, largest = 0;
  float first[LANES];
  search found;
  for (int64_t from = 0; from < groups->count; from += SEARCH_BLOCK) {
    const int64_t cols = fill_panel(groups, from, &panel);
    for (int64_t k = 0; k < cols; k++) {
      KT_LOOP
      for (int i = 0; i < LANES; i++) {
        const int32_t magnitude = (int32_t)(kt_bits(panel.column[k][i]) & 0x7fffffffu);
        most[i] = magnitude > most[i] ? magnitude : most[i];
      }
    }
  }
  KT_LOOP
  for (int i = 0; i < LANES; i++) {
    first[i] = int_scale(kt_float((uint32_t)most[i]), half_range, half).divisor;
    largest = most[i] > largest ? most[i] : largest;
  }
  if ((uint32_t)largest >= KT_NONFINITE_BITS) return (uint32_t)largest;
  if (half)
    search_scales(groups, first, 1, &panel, &found);
  else
    search_scales(groups, first, 0, &panel, &found);
  KT_LOOP
  for (int i = 0; i < LANES; i++) {
    const float amax = kt_float((uint32_t)most[i]);
    const int usual = amax >= (half ? 0x1p-10f : 0x1p-60f) && amax <= 0x1p60f;
    divisor[i] = usual ? found.best.divisor[i] : first[i];
  }
  return (uint32_t)largest;
}

#endif
