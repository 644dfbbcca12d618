/* train_truth.h - experts with LoRA and their gradients, token by token in double precision. */
#ifndef KT_TEST_TRAIN_TRUTH_H
#define KT_TEST_TRAIN_TRUTH_H

#include "layers.h"

enum { EXPERTS = 4, TOP_K = 2, MOST_PARTS = 3 };

/* A layer, a call of it, and all of it as numbers. */
typedef struct problem {
  kt_moe moe;
  kt_lora lora;
  kt_moe_call call;
  kt_moe_gradients gradients; /* dy, and the dtypes */
  kt_expert experts[MOST_PARTS * EXPERTS];
  expert_values values[MOST_PARTS * EXPERTS];
  float *matrix[GRADIENTS];        /* of LoRA, as they are multiplied; NULL: not there */
  float *x, *dy;                   /* rounded to bf16 */
  int32_t *ids;                    /* -1: skipped */
  uint8_t *keeps_x, *keeps_middle; /* [pairs][hidden or intermediate] 0: dropped */
  int reads_bf16;                  /* of activations, whatever the format */
} problem;

/* What one choice of a token computes; arrays of all parts. */
typedef struct slot_truth {
  double *x, *base_x;           /* [hidden] what A and W read */
  double *gate, *up;            /* [intermediate] before the function */
  double *middle, *base_middle; /* [intermediate] */
  double *d_gate, *d_up;        /* [intermediate] */
  double *a_x[2], *a_middle;    /* [rank] */
  double *b_d[2], *b_dy;        /* [rank] B^T of the gradients */
  double *y;                    /* [hidden], without its weight */
} slot_truth;

static inline double *zeros(int64_t count) {
  double *memory = calloc((size_t)count + 1, sizeof *memory);
  if (!memory) exit(2);
  return memory;
}

static inline int64_t pairs_of(const problem *p) { return p->call.tokens * p->call.top_k; }

static inline double factor_of(const problem *p) {
  return (double)p->lora.scale / (1.0 - (double)p->lora.dropout);
}

/* Elements of an expert's matrix. */
static inline int64_t size_of_matrix(const problem *p, int which) {
  const int64_t rank = p->lora.rank, hidden = p->moe.hidden, inner = p->moe.intermediate;
  switch (which) {
  case GATE_A:
  case UP_A:
  case DOWN_B: return rank * hidden;
  case GATE_B:
  case UP_B:
  case DOWN_A: return rank * inner;
  default: return hidden * inner;
  }
}

static inline const float *matrix_of(const problem *p, int which, int expert) {
  return p->matrix[which] + expert * size_of_matrix(p, which);
}

/* out[r] += factor * sum of m[r][c] * in[c], in two sums that do not wait for one another. */
static inline void multiply(const float *m, int64_t rows, int64_t cols, double factor,
                            const double *in, double *out) {
  for (int64_t r = 0; r < rows; r++) {
    const float *const row = m + r * cols;
    double even = 0, odd = 0;
    for (int64_t c = 0; c + 1 < cols; c += 2) {
      even += (double)row[c] * in[c];
      odd += (double)row[c + 1] * in[c + 1];
    }
    if (cols % 2) even += (double)row[cols - 1] * in[cols - 1];
    out[r] += factor * (even + odd);
  }
}

/* out[c] += factor * sum of m[r][c] * in[r] */
static inline void multiply_transposed(const float *m, int64_t rows, int64_t cols, double factor,
                                       const double *in, double *out) {
  for (int64_t r = 0; r < rows; r++) {
    const double times = factor * in[r];
    for (int64_t c = 0; c < cols; c++) out[c] += times * (double)m[r * cols + c];
  }
}

/* out[r][c] += factor * a[r] * b[c]; rows of out `stride` elements apart. */
static inline void add_outer(const double *a, int64_t rows, const double *b, int64_t cols,
                             double factor, int64_t stride, double *out) {
  for (int64_t r = 0; r < rows; r++) {
    const double times = factor * a[r];
    for (int64_t c = 0; c < cols; c++) out[r * stride + c] += times * b[c];
  }
}

/* As the format rounds them: what W reads. */
static inline void rounded(const problem *p, const double *in, int64_t count, double *out) {
  static const kt_layout bf16 = {KT_FORMAT_BF16, 0, KT_SCALE_NONE};
  float *row = malloc((size_t)count * sizeof *row);
  if (!row) exit(2);
  for (int64_t i = 0; i < count; i++) row[i] = (float)in[i];
  round_row(p->reads_bf16 ? &bf16 : &p->moe.layout, row, count);
  for (int64_t i = 0; i < count; i++) out[i] = (double)row[i];
  free(row);
}

static inline void drop(const uint8_t *keeps, int64_t count, double *row) {
  for (int64_t i = 0; keeps && i < count; i++) row[i] = keeps[i] ? row[i] : 0.0;
}

/* ---- Forward ---------------------------------------------------------------- */

static inline void inner_truth(const problem *p, const slot_truth *s, int expert, int64_t part) {
  const int64_t hidden = p->moe.hidden, width = p->moe.intermediate / p->moe.parts;
  const expert_values *v = p->values + part * EXPERTS + expert;
  double *const gate = s->gate + part * width, *const up = s->up + part * width;
  for (int64_t i = 0; i < width; i++) {
    gate[i] += (double)bias_of(v->biases->gate_bias, i);
    up[i] += (double)bias_of(v->biases->up_bias, i);
  }
  if (v->gate) multiply(v->gate, width, hidden, 1.0, s->base_x, gate);
  multiply(v->up, width, hidden, 1.0, s->base_x, up);
  for (int64_t i = 0; i < width; i++)
    s->middle[part * width + i] = activated(&p->moe.activation, gate[i], up[i]);
  rounded(p, s->middle + part * width, width, s->base_middle + part * width);
  multiply(v->down, hidden, width, 1.0, s->base_middle + part * width, s->y);
  for (int64_t i = 0; i < hidden; i++) s->y[i] += (double)bias_of(v->biases->down_bias, i);
}

static inline void slot_forward(const problem *p, const slot_truth *s, int64_t pair) {
  const int64_t rank = p->lora.rank, hidden = p->moe.hidden, inner = p->moe.intermediate;
  const int expert = p->ids[pair];
  double *const inside[2] = {s->gate, s->up};
  for (int64_t i = 0; i < hidden; i++) s->x[i] = (double)p->x[pair / TOP_K * hidden + i];
  rounded(p, s->x, hidden, s->base_x);
  drop(p->keeps_x ? p->keeps_x + pair * hidden : NULL, hidden, s->x);
  for (int side = 0; side < 2; side++) {
    if (!p->matrix[GATE_A + 2 * side]) continue;
    multiply(matrix_of(p, GATE_A + 2 * side, expert), rank, hidden, 1.0, s->x, s->a_x[side]);
    multiply(matrix_of(p, GATE_B + 2 * side, expert), inner, rank, factor_of(p), s->a_x[side],
             inside[side]);
  }
  for (int64_t part = 0; part < p->moe.parts; part++) inner_truth(p, s, expert, part);
  drop(p->keeps_middle ? p->keeps_middle + pair * inner : NULL, inner, s->middle);
  if (!p->matrix[DOWN_A]) return;
  multiply(matrix_of(p, DOWN_A, expert), rank, inner, 1.0, s->middle, s->a_middle);
  multiply(matrix_of(p, DOWN_B, expert), hidden, rank, factor_of(p), s->a_middle, s->y);
}

/* ---- Backward ----------------------------------------------------------------- */

/* The derivative by gate or up. At a limit it is that from inside, as a step back from 0 is. */
static inline double slope(const kt_activation *a, double gate, double up, int by_gate) {
  const double step = (by_gate ? gate : up) < 0.0 ? -1e-6 : 1e-6;
  const double here = activated(a, gate, up);
  return (here - activated(a, by_gate ? gate - step : gate, by_gate ? up : up - step)) / step;
}

/* Gradients of gate and up. */
static inline void through_function(const problem *p, const slot_truth *s, int64_t pair,
                                    const double *dy) {
  const int64_t hidden = p->moe.hidden, inner = p->moe.intermediate, width = inner / p->moe.parts;
  const int expert = p->ids[pair];
  double *base = zeros(inner), *lora = zeros(inner);
  for (int64_t part = 0; part < p->moe.parts; part++)
    multiply_transposed(p->values[part * EXPERTS + expert].down, hidden, width, 1.0, dy,
                        base + part * width);
  if (p->matrix[DOWN_A]) {
    multiply_transposed(matrix_of(p, DOWN_B, expert), hidden, p->lora.rank, 1.0, dy, s->b_dy);
    multiply_transposed(matrix_of(p, DOWN_A, expert), p->lora.rank, inner, factor_of(p), s->b_dy,
                        lora);
    drop(p->keeps_middle ? p->keeps_middle + pair * inner : NULL, inner, lora);
  }
  for (int64_t i = 0; i < inner; i++) {
    const double d = (double)p->call.weights[pair] * (base[i] + lora[i]);
    s->d_gate[i] = d * slope(&p->moe.activation, s->gate[i], s->up[i], 1);
    s->d_up[i] = d * slope(&p->moe.activation, s->gate[i], s->up[i], 0);
  }
  free(base);
  free(lora);
}

static inline void through_inputs(const problem *p, const slot_truth *s, int64_t pair, double *dx) {
  const int64_t rank = p->lora.rank, hidden = p->moe.hidden, inner = p->moe.intermediate;
  const int64_t width = inner / p->moe.parts;
  const int expert = p->ids[pair];
  const double *const d[2] = {s->d_gate, s->d_up};
  double *lora = zeros(hidden);
  for (int64_t part = 0; part < p->moe.parts; part++) {
    const expert_values *v = p->values + part * EXPERTS + expert;
    if (v->gate) multiply_transposed(v->gate, width, hidden, 1.0, s->d_gate + part * width, dx);
    multiply_transposed(v->up, width, hidden, 1.0, s->d_up + part * width, dx);
  }
  for (int side = 0; side < 2; side++) {
    if (!p->matrix[GATE_A + 2 * side]) continue;
    multiply_transposed(matrix_of(p, GATE_B + 2 * side, expert), inner, rank, 1.0, d[side],
                        s->b_d[side]);
    multiply_transposed(matrix_of(p, GATE_A + 2 * side, expert), rank, hidden, factor_of(p),
                        s->b_d[side], lora);
  }
  drop(p->keeps_x ? p->keeps_x + pair * hidden : NULL, hidden, lora);
  for (int64_t i = 0; i < hidden; i++) dx[i] += lora[i];
  free(lora);
}

/* gradients: [GRADIENTS], of which those of matrices that are not there are left alone. */
static inline void matrix_gradients(const problem *p, const slot_truth *s, int64_t pair,
                                    const double *dy, double *const *gradients) {
  const int64_t rank = p->lora.rank, hidden = p->moe.hidden, inner = p->moe.intermediate;
  const double factor = factor_of(p), weight = (double)p->call.weights[pair];
  const double *const d[2] = {s->d_gate, s->d_up};
  double *at[GRADIENTS];
  for (int which = GATE_A; which < GRADIENTS; which++)
    at[which] = gradients[which] + p->ids[pair] * size_of_matrix(p, which);
  for (int side = 0; side < 2; side++) {
    add_outer(d[side], inner, s->base_x, hidden, 1.0, hidden, at[GATE + side]);
    if (!p->matrix[GATE_A + 2 * side]) continue;
    add_outer(s->b_d[side], rank, s->x, hidden, factor, hidden, at[GATE_A + 2 * side]);
    add_outer(d[side], inner, s->a_x[side], rank, factor, rank, at[GATE_B + 2 * side]);
  }
  add_outer(dy, hidden, s->base_middle, inner, weight, inner, at[DOWN]);
  if (!p->matrix[DOWN_A]) return;
  add_outer(s->b_dy, rank, s->middle, inner, factor * weight, inner, at[DOWN_A]);
  add_outer(dy, hidden, s->a_middle, rank, factor * weight, rank, at[DOWN_B]);
}

/* Arrays of a slot, of zeros, one after the other in `memory`. */
static inline slot_truth take_slot(const problem *p, double *memory) {
  const int64_t hidden = p->moe.hidden, inner = p->moe.intermediate, rank = p->lora.rank;
  double *const wide_ones = memory + 3 * hidden, *const narrow = wide_ones + 6 * inner;
  memset(memory, 0, (size_t)(3 * hidden + 6 * inner + 6 * rank) * sizeof *memory);
  return (slot_truth){.x = memory,
                      .base_x = memory + hidden,
                      .y = memory + 2 * hidden,
                      .gate = wide_ones,
                      .up = wide_ones + inner,
                      .middle = wide_ones + 2 * inner,
                      .base_middle = wide_ones + 3 * inner,
                      .d_gate = wide_ones + 4 * inner,
                      .d_up = wide_ones + 5 * inner,
                      .a_x = {narrow, narrow + rank},
                      .b_d = {narrow + 2 * rank, narrow + 3 * rank},
                      .a_middle = narrow + 4 * rank,
                      .b_dy = narrow + 5 * rank};
}

/* y [tokens, hidden], and all gradients; what they have must be zeros. */
static inline void compute_truth(const problem *p, double *y, double *const *gradients) {
  const int64_t hidden = p->moe.hidden;
  double *memory = zeros(3 * hidden + 6 * p->moe.intermediate + 6 * p->lora.rank);
  double *dy = zeros(hidden);
  for (int64_t pair = 0; pair < pairs_of(p); pair++) {
    const int64_t token = pair / TOP_K;
    if (p->ids[pair] < 0) continue;
    const slot_truth s = take_slot(p, memory);
    slot_forward(p, &s, pair);
    for (int64_t i = 0; i < hidden; i++) {
      dy[i] = (double)p->dy[token * hidden + i];
      y[token * hidden + i] += (double)p->call.weights[pair] * s.y[i];
      gradients[DWEIGHTS][pair] += dy[i] * s.y[i];
    }
    through_function(p, &s, pair, dy);
    through_inputs(p, &s, pair, gradients[DX] + token * hidden);
    matrix_gradients(p, &s, pair, dy, gradients);
  }
  free(memory);
  free(dy);
}

#endif
