/* router.h - from the logits of a token to its experts and their weights: what each level provides.
 *
 * Floats are compared as integers, `order`: they rise with the float, -0 counts as 0, and NaN as
 * -infinity, so every row has a best expert, and which one it is does not depend on the order of
 * comparisons. Rows are padded to whole blocks of KT_BLOCK. */
#ifndef KT_ROUTER_H
#define KT_ROUTER_H

#include "ktconv.h"

enum {
  KT_BLOCK = 16,
  KT_ORDER_TAKEN = INT32_MIN,           /* below every float: what cannot be chosen (any more) */
  KT_ORDER_LEAST = INT32_MIN + 0x7fffff /* of -infinity */
};

/* log(1 + exp(z)) = max(z, 0) + log1p(t) with t = exp(-|z|), and log1p(t) = 2 artanh(s) with s = t
 * / (2 + t) <= 1/3: artanh(s) / s is this series in s^2, highest power first. What is left out is
 * below 2e-8 of it. */
static const float kt_artanh_series[] = {1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9,
                                         1.0f / 7,  1.0f / 5,  1.0f / 3,  1.0f};
enum { KT_ARTANH_TERMS = 8 };

typedef struct kt_router_loops {
  /* padded = the logits and -infinity up to whole blocks; whether one of them is NaN. */
  int (*pad)(const float *logits, int64_t count, float *padded);
  /* Scores of `padded` logits. Those of KT_SIGMOID are times exp(-shift), shift <= 0. */
  void (*scores)(int scoring, float shift, const float *logits, int64_t padded, float *scores);
  /* order[i] of values[i] + added[i] (NULL: zeros), i < count. */
  void (*orders)(const float *values, const float *added, int64_t count, int32_t *order);
  /* The two largest of count orders; KT_ORDER_TAKEN where there is but one. */
  void (*best_two)(const int32_t *order, int64_t count, int32_t best[2]);
  /* The first of the largest of `padded` orders. */
  int64_t (*best)(const int32_t *order, int64_t padded);
} kt_router_loops;

extern const kt_router_loops kt_router_loops_scalar, kt_router_loops_avx512;

/* One token's row, in work. */
typedef struct kt_router_row {
  const kt_router *router;
  const kt_router_loops *loops;
  const float *sinks; /* the logits behind those of experts */
  int has_nan;
  float logits[KT_MAX_ROUTED], scores[KT_MAX_ROUTED];
  int32_t order[KT_MAX_ROUTED];
} kt_router_row;

static inline int64_t kt_padded(int64_t count) {
  return (count + KT_BLOCK - 1) / KT_BLOCK * KT_BLOCK;
}

/* How good each expert is (choice.c). */
void kt_router_order(kt_router_row *row);

/* top_k experts of a row, best first (choice.c). */
void kt_router_choose(kt_router_row *row, int64_t *ids);

/* Their weights (weights.c). */
void kt_router_weigh(kt_router_row *row, const int64_t *ids, float *weights);

/* Both by sparsemixer. */
void kt_router_mix(kt_router_row *row, int64_t *ids, float *weights);

#endif
