/* The weights of chosen experts. */
#include "../simd/exponential.h"
#include "router.h"

static float norm_of(const float *scores, int64_t count, float p) {
  double sum = 0, largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const double score = fabs((double)scores[i]);
    largest = score > largest ? score : largest;
    sum += p == 1.0f ? score : p == 2.0f ? score * score : isinf(p) ? 0 : pow(score, (double)p);
  }
  if (isinf(p)) return (float)largest;
  return (float)(p == 1.0f ? sum : p == 2.0f ? sqrt(sum) : pow(sum, 1 / (double)p));
}

/* Scores of chosen experts and sinks from their logits, times exp(-shift), which is returned: with
 * sinks scores may be of any size, and only their shares matter. */
static float score_again(const kt_router_row *row, const int64_t *ids, float *scores) {
  const kt_router *r = row->router;
  const int64_t count = r->top_k + r->sinks;
  float logits[KT_MAX_ROUTED], shift = -INFINITY;
  for (int64_t k = 0; k < r->top_k; k++) logits[k] = row->logits[ids[k]];
  for (int64_t i = 0; i < r->sinks; i++) logits[r->top_k + i] = row->sinks[i];
  for (int64_t i = 0; i < count; i++) shift = logits[i] > shift ? logits[i] : shift;
  for (int64_t i = count; i < kt_padded(count); i++) logits[i] = -INFINITY;
  if (!r->sinks || r->scoring != KT_SIGMOID || shift > 0.0f || shift == -INFINITY) shift = 0.0f;
  row->loops->scores(r->scoring, shift, logits, kt_padded(count), scores);
  return shift;
}

/* A bound of scores, for scores times exp(-shift). */
static float shifted(float bound, float shift) {
  return bound > 0.0f && shift < 0.0f ? bound * kt_exp(-shift) : bound;
}

static void renormalise(const kt_router *r, const float *scores, float shift, float *weights) {
  const float norm = norm_of(scores, r->top_k + r->sinks, r->p_norm) + shifted(r->epsilon, shift);
  const float least = shifted(r->least_sum, shift), divisor = norm < least ? least : norm;
  for (int64_t k = 0; k < r->top_k; k++) weights[k] = divisor == 0.0f ? 0.0f : scores[k] / divisor;
}

/* Whatever kind of NaN arithmetic makes on this machine, there is one. */
static void multiply(const kt_router_row *row, const int64_t *ids, float *weights) {
  const kt_router *r = row->router;
  for (int64_t k = 0; k < r->top_k; k++) {
    weights[k] *= r->factor;
    if (r->expert_factor) weights[k] *= r->expert_factor[ids[k]];
    if (row->has_nan || isnan(weights[k])) weights[k] = kt_float(0x7fc00000u);
  }
}

void kt_router_weigh(kt_router_row *row, const int64_t *ids, float *weights) {
  const kt_router *r = row->router;
  float scores[KT_MAX_ROUTED], shift = 0.0f;
  if (r->by_logits || (r->sinks && r->renormalise))
    shift = score_again(row, ids, scores);
  else
    for (int64_t k = 0; k < r->top_k; k++) scores[k] = row->scores[ids[k]];
  if (r->renormalise)
    renormalise(r, scores, shift, weights);
  else
    for (int64_t k = 0; k < r->top_k; k++) weights[k] = scores[k];
  multiply(row, ids, weights);
}

void kt_router_mix(kt_router_row *row, int64_t *ids, float *weights) {
  const kt_router *r = row->router;
  const int64_t padded = kt_padded(r->experts);
  float near[KT_MAX_ROUTED];
  kt_router_order(row);
  for (int64_t k = 0; k < r->top_k; k++) {
    ids[k] = row->loops->best(row->order, padded);
    const float best = row->logits[ids[k]];
    for (int64_t e = 0; e < padded; e++) {
      const float z = row->logits[e], size = fabsf(z) > best ? fabsf(z) : best;
      const int far = (best - z) / size > 2.0f * r->jitter;
      near[e] = far || row->order[e] == KT_ORDER_TAKEN ? -INFINITY : z;
    }
    row->loops->scores(KT_SOFTMAX, 0.0f, near, padded, row->scores);
    weights[k] = row->scores[ids[k]];
    row->order[ids[k]] = KT_ORDER_TAKEN;
  }
  multiply(row, ids, weights);
}
