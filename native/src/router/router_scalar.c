/* The loops of routers, and what every other level must equal. A sum has a lane for each place in a
 * block; the lanes are added up in a tree. */
#include "../simd/exponential.h"
#include "router.h"

static float sum_of(float lane[KT_BLOCK]) {
  for (int width = KT_BLOCK / 2; width; width /= 2)
    for (int j = 0; j < width; j++) lane[j] += lane[j + width];
  return lane[0];
}

static void softmax(const float *logits, int64_t padded, float *scores) {
  float most = -INFINITY, lane[KT_BLOCK] = {0};
  for (int64_t i = 0; i < padded; i++) most = logits[i] > most ? logits[i] : most;
  for (int64_t i = 0; i < padded; i++) {
    scores[i] = kt_exp(logits[i] - most);
    lane[i % KT_BLOCK] += scores[i];
  }
  const float sum = sum_of(lane);
  for (int64_t i = 0; i < padded; i++) scores[i] /= sum;
}

static float softplus(float z) {
  const float t = kt_exp(z > 0.0f ? -z : z), twice = 2.0f / (2.0f + t), s = 0.5f * t * twice;
  const float log1p_t = t * twice * kt_horner(kt_artanh_series, KT_ARTANH_TERMS, s * s);
  return (z < 0.0f ? 0.0f : z) + log1p_t;
}

static void scores(int scoring, float shift, const float *logits, int64_t padded, float *scores) {
  if (scoring == KT_SOFTMAX) softmax(logits, padded, scores);
  const float one = kt_exp(shift);
  for (int64_t i = 0; i < padded && scoring == KT_SIGMOID; i++)
    scores[i] = 1.0f / (one + kt_exp(shift - logits[i]));
  for (int64_t i = 0; i < padded && scoring == KT_SQRT_SOFTPLUS; i++)
    scores[i] = sqrtf(softplus(logits[i]));
}

static int pad(const float *logits, int64_t count, float *padded) {
  int has_nan = 0;
  for (int64_t i = 0; i < kt_padded(count); i++) {
    padded[i] = i < count ? logits[i] : -INFINITY;
    has_nan |= isnan(padded[i]);
  }
  return has_nan;
}

/* Negative floats fall as their bits rise. */
static int32_t order_of(float value) {
  const int32_t bits = (int32_t)kt_bits(value + 0.0f);
  return isnan(value) ? KT_ORDER_LEAST : bits < 0 ? bits ^ 0x7fffffff : bits;
}

static void orders(const float *values, const float *added, int64_t count, int32_t *order) {
  for (int64_t i = 0; i < count; i++) order[i] = order_of(added ? values[i] + added[i] : values[i]);
}

static void best_two(const int32_t *order, int64_t count, int32_t best[2]) {
  best[0] = best[1] = KT_ORDER_TAKEN;
  for (int64_t i = 0; i < count; i++) {
    const int32_t less = order[i] < best[0] ? order[i] : best[0];
    best[0] = order[i] > best[0] ? order[i] : best[0];
    best[1] = less > best[1] ? less : best[1];
  }
}

static int64_t best(const int32_t *order, int64_t padded) {
  int64_t at = 0;
  for (int64_t i = 1; i < padded; i++)
    if (order[i] > order[at]) at = i;
  return at;
}

const kt_router_loops kt_router_loops_scalar = {pad, scores, orders, best_two, best};
