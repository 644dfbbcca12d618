/* Linear layers of few tokens: their weights are read once, by all threads. */
#include "../pool/pool.h"
#include "../simd/float_mode.h"
#include "dense.h"

typedef struct call {
  const kt_linear *linear; /* [count], of the same x, and where their outputs go */
  uint16_t *const *y;
  int64_t count;
  const kt_dense_math *math;
  const uint16_t *x;
  int64_t tokens;
  kt_share blocks; /* of all of them */
} call;

/* Rows first .. first + count - 1 of a matrix, for some tokens from `token` on. */
static void multiply(const call *c, const kt_linear *l, uint16_t *y, int64_t first, int64_t count,
                     int64_t token, int64_t tokens) {
  const uint16_t *const weight = l->weight, *const bias = l->bias;
  const kt_bf16_rows w = {weight + first * l->cols, count, l->cols, l->cols};
  const kt_bf16_rows x = {c->x + token * l->cols, tokens, l->cols, l->cols};
  float out[KT_DENSE_TOKENS * KT_DENSE_ROWS];
  c->math->dots(&w, &x, out, KT_DENSE_ROWS);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t n = 0; n < count; n++) {
      const float sum = out[t * KT_DENSE_ROWS + n];
      y[(token + t) * l->rows + first + n] =
          kt_bf16_bits(bias ? sum + kt_bf16_float(bias[first + n]) : sum);
    }
}

static int64_t blocks_of(const kt_linear *l) {
  return (l->rows + KT_DENSE_ROWS - 1) / KT_DENSE_ROWS;
}

/* A block of the matrices one after the other. */
static void block(const call *c, int64_t number) {
  int64_t i = 0;
  for (; number >= blocks_of(&c->linear[i]); i++) number -= blocks_of(&c->linear[i]);
  const kt_linear *const l = &c->linear[i];
  const int64_t first = number * KT_DENSE_ROWS, left = l->rows - first;
  const int64_t count = left < KT_DENSE_ROWS ? left : KT_DENSE_ROWS;
  for (int64_t t = 0; t < c->tokens; t += KT_DENSE_TOKENS)
    multiply(c, l, c->y[i], first, count, t,
             c->tokens - t < KT_DENSE_TOKENS ? c->tokens - t : KT_DENSE_TOKENS);
}

static void job(void *context, int32_t thread) {
  call *c = context;
  (void)thread;
  const uint64_t mode = kt_float_mode_enter();
  for (int64_t first, count; kt_share_take(&c->blocks, &first, &count);)
    for (int64_t b = first; b < first + count; b++) block(c, b);
  kt_float_mode_leave(mode);
}

int kt_linear_fits(const kt_linear *l) {
  return l->rows > 0 && l->cols > 0 && l->rows <= INT32_MAX && l->cols <= INT32_MAX &&
         kt_is_bf16_array(l->weight) && (!l->bias || kt_is_bf16_array(l->bias));
}

kt_status kt_linears_run(const kt_linear *linear, int64_t count, kt_pool *pool, int64_t tokens,
                         const uint16_t *x, uint16_t *const *y) {
  call c = {.linear = linear, .y = y, .count = count, .math = kt_dense_math_best(), .x = x};
  c.tokens = tokens;
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; i++) blocks += blocks_of(&linear[i]);
  const int alone = blocks == 1; /* waking others would take longer */
  kt_share_init(&c.blocks, blocks, 1, alone ? 1 : kt_pool_threads(pool));
  if (!alone) return kt_pool_run(pool, job, &c);
  job(&c, 0);
  return KT_OK;
}

kt_status kt_linear_forward(const kt_linear *linear, kt_pool *pool, int64_t tokens, const void *x,
                            void *y) {
  if (!linear || !kt_linear_fits(linear) || !pool || tokens < 0 || tokens > INT32_MAX)
    return KT_ERR_ARGUMENT;
  if (!tokens) return KT_OK;
  if (!kt_is_bf16_array(x) || !kt_is_bf16_array(y)) return KT_ERR_ARGUMENT;
  uint16_t *const to = y;
  return kt_linears_run(linear, 1, pool, tokens, x, &to);
}
