/* The public entry point of routers: check, share out the tokens, call the level's loops. */
#include "router.h"

#include "../cpu.h"
#include "../pool/pool.h"
#include "../simd/float_mode.h"

#include <math.h>
#include <string.h>

static const kt_router_loops *const all_loops[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_router_loops_scalar,
#if KT_X86
    [KT_ISA_AVX512] = &kt_router_loops_avx512,
#endif
};

typedef struct call {
  const kt_router *router;
  const kt_router_loops *loops;
  const float *logits;
  const int64_t *given;
  int64_t *ids;
  float *weights;
  kt_share tokens;
} call;

static int fits(const kt_router *r) {
  if (r->experts < 1 || r->sinks < 0 || r->top_k < 1 || r->groups < 1 || r->keep < 1) return 0;
  if (r->experts > KT_MAX_ROUTED || r->sinks > KT_MAX_ROUTED - r->experts) return 0;
  if (r->experts % r->groups || r->keep > r->groups) return 0;
  return r->top_k <= r->experts / r->groups * r->keep;
}

static int in_range(const kt_router *r) {
  if (r->scoring < KT_SOFTMAX || r->scoring > KT_SQRT_SOFTPLUS) return 0;
  if (r->group_score != 1 && r->group_score != 2) return 0;
  if (isnan(r->masked) || isnan(r->jitter) || !isfinite(r->factor)) return 0;
  return r->p_norm > 0.0f && r->epsilon >= 0.0f && r->least_sum >= 0.0f;
}

/* What sinks and sparsemixer do not take. */
static int together(const kt_router *r) {
  if (r->sinks && r->scoring == KT_SOFTMAX) return 0;
  if (r->jitter < 0.0f) return 1;
  return r->scoring == KT_SOFTMAX && r->groups == 1 && !r->correction && !r->sinks &&
         !r->by_logits && !r->renormalise;
}

static int are_experts(const int64_t *ids, int64_t count, int64_t experts) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= experts) return 0;
  return 1;
}

static void one_token(const call *c, kt_router_row *row, int64_t t) {
  const kt_router *r = c->router;
  const float *logits = c->logits + t * (r->experts + r->sinks);
  int64_t *ids = c->ids + t * r->top_k;
  float *weights = c->weights + t * r->top_k;
  row->sinks = logits + r->experts;
  row->has_nan = c->loops->pad(logits, r->experts, row->logits);
  if (r->jitter >= 0.0f) {
    kt_router_mix(row, ids, weights);
    return;
  }
  if (!r->by_logits)
    c->loops->scores(r->scoring, 0.0f, row->logits, kt_padded(r->experts), row->scores);
  if (c->given)
    memmove(ids, c->given + t * r->top_k, (size_t)r->top_k * sizeof *ids);
  else
    kt_router_choose(row, ids);
  kt_router_weigh(row, ids, weights);
}

static void job(void *context, int32_t thread) {
  call *c = context;
  kt_router_row row;
  row.router = c->router, row.loops = c->loops;
  (void)thread;
  const uint64_t mode = kt_float_mode_enter();
  for (int64_t first, count; kt_share_take(&c->tokens, &first, &count);)
    for (int64_t t = first; t < first + count; t++) one_token(c, &row, t);
  kt_float_mode_leave(mode);
}

kt_status kt_choose_experts(const kt_router *router, kt_pool *pool, int64_t tokens,
                            const float *logits, const int64_t *given, int64_t *ids,
                            float *weights) {
  if (!router || tokens < 0 || !fits(router) || !in_range(router) || !together(router))
    return KT_ERR_ARGUMENT;
  if (given && router->jitter >= 0.0f) return KT_ERR_ARGUMENT;
  if (tokens > INT64_MAX / KT_MAX_ROUTED / (int64_t)sizeof(int64_t)) return KT_ERR_ARGUMENT;
  if (!tokens) return KT_OK;
  if (!logits || !ids || !weights) return KT_ERR_ARGUMENT;
  if (given && !are_experts(given, tokens * router->top_k, router->experts)) return KT_ERR_EXPERT;
  call c = {.router = router,
            .loops = KT_CELL(all_loops),
            .logits = logits,
            .given = given,
            .ids = ids,
            .weights = weights};
  kt_share_init(&c.tokens, tokens, 16, pool ? kt_pool_threads(pool) : 1);
  if (pool) return kt_pool_run(pool, job, &c);
  job(&c, 0);
  return KT_OK;
}
