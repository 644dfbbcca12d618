/* Attention of one token: units of a head of keys and some tokens, then the sums of a head's units.
 *
 * With m the largest product of a head's query with the keys of unit u, a unit leaves m, the sum of
 * exp(scale * (s - m)) and the sum of values weighed by them. */
#include "../pool/pool.h"
#include "../simd/exponential.h"
#include "../simd/float_mode.h"
#include "dense.h"

#include <math.h>
#include <string.h>

enum { MOST_COLS = 1024, HEADS = 8 /* of queries at a time */ };

typedef struct call {
  const kt_attention *a;
  const kt_dense_math *math;
  float *partial; /* [units of a head][heads][value_cols + 2] */
  int64_t units;
  kt_share work, ends;
  kt_barrier barrier;
} call;

static int64_t units_of(int64_t tokens) {
  return (tokens + KT_ATTEND_TOKENS - 1) / KT_ATTEND_TOKENS;
}

static float *partial_of(const call *c, int64_t unit, int64_t head) {
  return c->partial + (unit * c->a->heads + head) * (c->a->value_cols + 2);
}

/* Some heads of queries, which have one head of keys. */
static void attend(const call *c, int64_t unit, int64_t keys, int64_t head, int64_t heads) {
  const kt_attention *a = c->a;
  const int64_t first = unit * KT_ATTEND_TOKENS, left = a->tokens - first;
  const int64_t count = left < KT_ATTEND_TOKENS ? left : KT_ATTEND_TOKENS;
  const uint16_t *const key = a->keys, *const value = a->values, *const query = a->queries;
  const kt_bf16_rows k = {key + keys * a->key_head + first * a->key_token, count, a->cols,
                          a->key_token};
  const kt_bf16_rows v = {value + keys * a->value_head + first * a->value_token, count,
                          a->value_cols, a->value_token};
  const kt_bf16_rows q = {query + head * a->cols, heads, a->cols, a->cols};
  float s[HEADS * KT_ATTEND_TOKENS], out[HEADS * MOST_COLS];
  c->math->dots(&k, &q, s, KT_ATTEND_TOKENS);
  for (int64_t h = 0; h < heads; h++) {
    float *const row = s + h * KT_ATTEND_TOKENS, *const to = partial_of(c, unit, head + h);
    float max = row[0];
    for (int64_t n = 1; n < count; n++) max = row[n] > max ? row[n] : max;
    to[a->value_cols] = max;
    to[a->value_cols + 1] = c->math->exponentials(row, count, a->scale, max);
  }
  c->math->weigh(&v, s, KT_ATTEND_TOKENS, heads, out);
  for (int64_t h = 0; h < heads; h++)
    memcpy(partial_of(c, unit, head + h), out + h * a->value_cols,
           (size_t)a->value_cols * sizeof *out);
}

static void unit_of_head(const call *c, int64_t number) {
  const int64_t keys = number / c->units, each = c->a->heads / c->a->key_heads;
  for (int64_t h = 0; h < each; h += HEADS)
    attend(c, number % c->units, keys, keys * each + h, each - h < HEADS ? each - h : HEADS);
}

static void end_head(const call *c, int64_t head) {
  const int64_t cols = c->a->value_cols;
  uint16_t *const y = (uint16_t *)c->a->y + head * cols;
  float max = partial_of(c, 0, head)[cols], total = 0.0f, sum[MOST_COLS] = {0};
  for (int64_t u = 1; u < c->units; u++) max = fmaxf(max, partial_of(c, u, head)[cols]);
  for (int64_t u = 0; u < c->units; u++) {
    const float *const from = partial_of(c, u, head);
    const float factor = kt_exp(c->a->scale * (from[cols] - max));
    total = fmaf(factor, from[cols + 1], total);
    for (int64_t i = 0; i < cols; i++) sum[i] = fmaf(factor, from[i], sum[i]);
  }
  for (int64_t i = 0; i < cols; i++) y[i] = kt_bf16_bits(sum[i] / total);
}

static void job(void *context, int32_t thread) {
  call *c = context;
  const uint64_t mode = kt_float_mode_enter();
  for (int64_t first, count; kt_share_take(&c->work, &first, &count);)
    for (int64_t n = first; n < first + count; n++) unit_of_head(c, n);
  kt_barrier_wait(&c->barrier, thread);
  for (int64_t first, count; kt_share_take(&c->ends, &first, &count);)
    for (int64_t h = first; h < first + count; h++) end_head(c, h);
  kt_float_mode_leave(mode);
}

/* Sums of all units have fewer bytes than 2^63. */
static int sums_fit(const kt_attention *a) {
  const int64_t of_unit = a->heads * (a->value_cols + 2) * (int64_t)sizeof(float);
  return units_of(a->tokens) <= INT64_MAX / of_unit;
}

static int sizes_fit(const kt_attention *a) {
  return a && a->heads > 0 && a->key_heads > 0 && a->heads <= INT32_MAX &&
         a->heads % a->key_heads == 0 && a->cols > 0 && a->cols <= MOST_COLS && a->value_cols > 0 &&
         a->value_cols <= MOST_COLS && a->tokens > 0 && a->tokens <= INT32_MAX && sums_fit(a);
}

size_t kt_attention_scratch_size(const kt_attention *attention) {
  if (!sizes_fit(attention)) return 0;
  return (size_t)(units_of(attention->tokens) * attention->heads * (attention->value_cols + 2)) *
         sizeof(float);
}

kt_status kt_attend(const kt_attention *attention, kt_pool *pool, void *scratch,
                    size_t scratch_size) {
  if (!sizes_fit(attention) || !pool || !isfinite(attention->scale) || attention->scale <= 0.0f)
    return KT_ERR_ARGUMENT;
  if (!kt_is_bf16_array(attention->queries) || !kt_is_bf16_array(attention->keys) ||
      !kt_is_bf16_array(attention->values) || !kt_is_bf16_array(attention->y))
    return KT_ERR_ARGUMENT;
  if (!scratch || (uintptr_t)scratch % sizeof(float) ||
      scratch_size < kt_attention_scratch_size(attention))
    return KT_ERR_SCRATCH;
  const int32_t threads = kt_pool_threads(pool);
  call c = {.a = attention,
            .math = kt_dense_math_best(),
            .partial = scratch,
            .units = units_of(attention->tokens)};
  kt_share_init(&c.work, attention->key_heads * c.units, 1, threads);
  kt_share_init(&c.ends, attention->heads, 1, threads);
  kt_barrier_init(&c.barrier, threads);
  return kt_pool_run(pool, job, &c);
}
