/* Which experts of a row: those of the highest scores, in the best groups where there are some. */
#include "../simd/bits.h"
#include "router.h"

#include <math.h>

static float value_of(int32_t order) {
  return kt_float((uint32_t)(order < 0 ? order ^ 0x7fffffff : order));
}

/* The score of one group. The sum of infinities of both signs counts as NaN. */
static int32_t group_order(const kt_router_row *row, const int32_t *order, int64_t size) {
  int32_t two[2], sum;
  row->loops->best_two(order, size, two);
  if (row->router->group_score == 1 || size == 1) return two[0];
  const float values[2] = {value_of(two[0]), value_of(two[1])};
  row->loops->orders(values, values + 1, 1, &sum);
  return sum;
}

/* Masks the experts of all groups but the best ones. */
static void keep_best_groups(kt_router_row *row) {
  const kt_router *r = row->router;
  const int64_t size = r->experts / r->groups, padded = kt_padded(r->groups);
  int32_t groups[KT_MAX_ROUTED], masked = KT_ORDER_TAKEN;
  if (r->masked != -INFINITY) row->loops->orders(&r->masked, NULL, 1, &masked);
  for (int64_t g = 0; g < r->groups; g++) groups[g] = group_order(row, row->order + g * size, size);
  for (int64_t g = r->groups; g < padded; g++) groups[g] = KT_ORDER_TAKEN;
  for (int64_t i = 0; i < r->keep; i++) groups[row->loops->best(groups, padded)] = KT_ORDER_TAKEN;
  for (int64_t g = 0; g < r->groups; g++)
    for (int64_t e = g * size; e < (g + 1) * size && groups[g] != KT_ORDER_TAKEN; e++)
      row->order[e] = masked;
}

void kt_router_order(kt_router_row *row) {
  const kt_router *r = row->router;
  const float *values = r->by_logits || r->jitter >= 0.0f ? row->logits : row->scores;
  row->loops->orders(values, r->correction, r->experts, row->order);
  for (int64_t e = r->experts; e < kt_padded(r->experts); e++) row->order[e] = KT_ORDER_TAKEN;
}

void kt_router_choose(kt_router_row *row, int64_t *ids) {
  const int64_t padded = kt_padded(row->router->experts);
  kt_router_order(row);
  if (row->router->groups > 1) keep_best_groups(row);
  for (int64_t k = 0; k < row->router->top_k; k++) {
    ids[k] = row->loops->best(row->order, padded);
    row->order[ids[k]] = KT_ORDER_TAKEN;
  }
}
