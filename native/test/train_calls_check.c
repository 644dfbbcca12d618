/* train_calls_check.c - how fine-tuning is called: what is wanted, batches, refusals.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/train_calls_check.c -lm -pthread && ./a.out
 *
 * All memory ends at unreadable pages. Exit code: 0 all passed, 1 something differed, 2 no
 * memory. */
#define _GNU_SOURCE
#include "train_problem.h"

static kt_pool *pool;

/* ---- Any selection of gradients -------------------------------------------------------- */

/* Every selection has the bits of all of them, from what one forward has saved. */
static void check_selections(const trial *t) {
  problem p;
  make_problem(t, &p);
  const result all = make_result(&p, -1), some = make_result(&p, -1);
  const room m = make_room(&p, pool);
  spoil(&p, &all);
  if (forward(&p, pool, &m, m.saved, all.y) || backward(&p, pool, &m, &all)) failures++;
  for (int wanted = 0; wanted < 1 << GRADIENTS; wanted++) {
    result r = {.y = all.y};
    spoil(&p, &some);
    for (int which = 0; which < GRADIENTS; which++)
      if (wanted >> which & 1) r.gradient[which] = some.gradient[which];
    memset(m.scratch, 0xff, m.scratch_size);
    if (backward(&p, pool, &m, &r) != KT_OK) failures++;
    memcpy(some.y, all.y, y_bytes(&p));
    expect_same(t, &p, &all, &r, "with other gradients wanted");
  }
  release_result(&p, &all);
  release_result(&p, &some);
  release_room(&m);
  free_problem(&p);
}

/* ---- Batches ---------------------------------------------------------------------------- */

enum { BATCH = 2048, TOKENS = 2053 };

static const trial batched = {.kind = BF16,
                              .activation = SILU,
                              .hidden = 32,
                              .width = 32,
                              .parts = 1,
                              .tokens = TOKENS,
                              .rank = 4,
                              .adapted = FOR_ALL,
                              .dropout = 0.25f,
                              .lora_dtype = KT_BF16,
                              .x_dtype = KT_BF16,
                              .y_dtype = KT_F32,
                              .dy_dtype = KT_BF16,
                              .dx_dtype = KT_F32,
                              .id_size = 4};

/* Results of the first `to` tokens, where those before `from` go to no expert. */
static result results_of(const problem *p, int64_t from, int64_t to) {
  problem some = *p;
  some.call.tokens = to;
  int32_t *const ids = guarded((size_t)pairs_of(&some) * sizeof *ids);
  for (int64_t i = 0; i < pairs_of(&some); i++) ids[i] = i / TOP_K < from ? -1 : p->ids[i];
  some.call.ids = ids;
  const result r = make_result(&some, -1);
  compute(&some, pool, &r);
  return r;
}

/* Rows of tokens first .. first + count - 1 of both. */
static void expect_rows(const void *a, const void *b, int64_t first, int64_t count, size_t row,
                        const char *what) {
  const size_t at = (size_t)first * row;
  if (memcmp((const uint8_t *)a + at, (const uint8_t *)b + at, (size_t)count * row))
    fail(&batched, what, 0);
}

/* Tokens have the same results whoever else is there, gradients of matrices are sums over all
 * batches, and a token that is there twice does not drop the same elements. */
static void check_batches(void) {
  problem p;
  make_problem(&batched, &p);
  uint16_t *const x = (uint16_t *)(uintptr_t)p.call.x;
  const size_t row = (size_t)p.moe.hidden * sizeof(float);
  memcpy(x + BATCH * p.moe.hidden, x, row / 2);
  memcpy((float *)(uintptr_t)p.call.weights + BATCH * TOP_K, p.call.weights, TOP_K * sizeof(float));
  memcpy(p.ids + BATCH * TOP_K, p.ids, TOP_K * sizeof *p.ids);
  const result all = results_of(&p, 0, TOKENS), before = results_of(&p, 0, BATCH);
  const result behind = results_of(&p, BATCH, TOKENS);
  expect_rows(all.y, before.y, 0, BATCH, row, "y of the first batch");
  problem same = p;
  same.call.ids = p.ids;
  expect_rounded(&batched, &same, pool, &all);
  expect_rows(all.y, behind.y, BATCH, TOKENS - BATCH, row, "y of the second batch");
  expect_rows(all.gradient[DX], behind.gradient[DX], BATCH, TOKENS - BATCH, row, "dx");
  expect_rows(all.gradient[DWEIGHTS], behind.gradient[DWEIGHTS], BATCH, TOKENS - BATCH,
              TOP_K * sizeof(float), "dweights");
  if (memcmp(all.y, (uint8_t *)all.y + BATCH * row, row) == 0) fail(&batched, "dropout of two", 0);
  for (int which = GATE_A; which < GRADIENTS; which++)
    for (int64_t i = 0; i < count_of(&p, which); i++) {
      const double parts = (double)value_at(KT_F32, before.gradient[which], i) +
                           (double)value_at(KT_F32, behind.gradient[which], i);
      const double error = fabs((double)value_at(KT_F32, all.gradient[which], i) - parts);
      if (error <= 1e-4) continue;
      fail(&batched, names[which], error);
      break;
    }
  free_problem(&p);
}

/* ---- Refusals ----------------------------------------------------------------------------- */

static const trial small = {.kind = BF16,
                            .activation = SILU,
                            .hidden = 32,
                            .width = 32,
                            .parts = 2,
                            .tokens = 3,
                            .rank = 4,
                            .adapted = FOR_ALL,
                            .lora_dtype = KT_F32,
                            .x_dtype = KT_BF16,
                            .y_dtype = KT_BF16,
                            .dy_dtype = KT_BF16,
                            .dx_dtype = KT_BF16,
                            .id_size = 8};

/* All arguments of both functions. */
typedef struct arguments {
  problem p;
  kt_moe_gradients want;
  room m;
  result r;
  const kt_moe *moe;
  const kt_lora *lora;
  const kt_moe_call *call;
  const kt_moe_gradients *gradients;
  kt_pool *pool;
} arguments;

static void make_arguments(arguments *a) {
  state = 77;
  make_problem(&small, &a->p);
  a->p.moe.expert = a->p.experts;
  a->r = make_result(&a->p, -1);
  a->m = make_room(&a->p, pool);
  a->p.call.y = a->r.y;
  a->want = pointers(&a->p, &a->r);
  a->moe = &a->p.moe, a->lora = &a->p.lora, a->call = &a->p.call, a->gradients = &a->want;
  a->pool = pool;
}

static kt_status go_forward(const arguments *a) {
  return kt_train_forward(a->moe, a->lora, a->pool, a->call, a->m.saved, a->m.scratch,
                          a->m.scratch_size);
}

static kt_status go_backward(const arguments *a) {
  return kt_train_backward(a->moe, a->lora, a->pool, a->call, a->m.saved, a->gradients,
                           a->m.scratch, a->m.scratch_size);
}

static void *shifted(const void *pointer) { return (uint8_t *)(uintptr_t)pointer + 1; }

static void take_gate(arguments *a) {
  a->p.moe.activation.function = KT_RELU2;
  a->p.lora.gate_a = a->p.lora.gate_b = NULL;
  a->want.gate_a = a->want.gate_b = NULL;
  for (int i = 0; i < MOST_PARTS * EXPERTS; i++)
    a->p.experts[i].gate = a->p.experts[i].gate_scale = NULL;
}

/* X(name, status, what): the wrong thing. */
#define OF_BOTH(X)                                                                                 \
  X(no_moe, ARGUMENT, a->moe = NULL)                                                               \
  X(no_pool, ARGUMENT, a->pool = NULL)                                                             \
  X(no_call, ARGUMENT, a->call = NULL)                                                             \
  X(no_experts, ARGUMENT, a->p.moe.expert = NULL)                                                  \
  X(odd_parts, SHAPE, a->p.moe.parts = 3)                                                          \
  X(odd_hidden, SHAPE, a->p.moe.hidden = 33)                                                       \
  X(no_function, ARGUMENT, a->p.moe.activation.function = 99)                                      \
  X(nan_limit, ARGUMENT, a->p.moe.activation.limit = NAN)                                          \
  X(few_tokens, ARGUMENT, a->p.call.tokens = -1)                                                   \
  X(many_tokens, ARGUMENT, a->p.call.tokens = INT64_MAX)                                           \
  X(no_choice, ARGUMENT, a->p.call.top_k = 0)                                                      \
  X(no_x, ARGUMENT, a->p.call.x = NULL)                                                            \
  X(odd_x, ARGUMENT, a->p.call.x = shifted(a->p.call.x))                                           \
  X(other_x, ARGUMENT, a->p.call.x_dtype = 99)                                                     \
  X(no_ids, ARGUMENT, a->p.call.ids = NULL)                                                        \
  X(other_ids, ARGUMENT, a->p.call.id_size = 2)                                                    \
  X(no_weights, ARGUMENT, a->p.call.weights = NULL)                                                \
  X(rank_0, ARGUMENT, a->p.lora.rank = 0)                                                          \
  X(rank_1025, ARGUMENT, a->p.lora.rank = KT_MAX_RANK + 1)                                         \
  X(inf_scale, ARGUMENT, a->p.lora.scale = INFINITY)                                               \
  X(inf_factor, ARGUMENT, a->p.lora.scale = 3e38f, a->p.lora.dropout = 0.5f)                       \
  X(dropout_1, ARGUMENT, a->p.lora.dropout = 1.0f)                                                 \
  X(dropout_minus, ARGUMENT, a->p.lora.dropout = -0.5f)                                            \
  X(dropout_nan, ARGUMENT, a->p.lora.dropout = NAN)                                                \
  X(half_lora, ARGUMENT, a->p.lora.dtype = KT_F16)                                                 \
  X(no_gate_b, ARGUMENT, a->p.lora.gate_b = NULL)                                                  \
  X(no_up_a, ARGUMENT, a->p.lora.up_a = NULL)                                                      \
  X(no_down_b, ARGUMENT, a->p.lora.down_b = NULL)                                                  \
  X(odd_down_a, ARGUMENT, a->p.lora.down_a = shifted(a->p.lora.down_a))                            \
  X(ungated_lora, ARGUMENT, a->p.moe.activation.function = KT_RELU2)                               \
  X(no_scratch, ARGUMENT, a->m.scratch = NULL)                                                     \
  X(odd_scratch, ARGUMENT, a->m.scratch = shifted(a->m.scratch))                                   \
  X(odd_saved, ARGUMENT, a->m.saved = shifted(a->m.saved))                                         \
  X(little_scratch, SCRATCH, a->m.scratch_size = 64)                                               \
  X(no_up, EXPERT, a->p.experts[0].up = NULL)                                                      \
  X(no_gate_of_part, EXPERT, a->p.experts[EXPERTS].gate = NULL)                                    \
  X(bias_of_part, ARGUMENT, a->p.experts[EXPERTS].down_bias = a->p.call.weights)

#define OF_FORWARD(X)                                                                              \
  X(with_add, ARGUMENT, a->p.call.add = a->p.call.weights)                                         \
  X(no_y, ARGUMENT, a->p.call.y = NULL)                                                            \
  X(other_y, ARGUMENT, a->p.call.y_dtype = 99)

#define OF_BACKWARD(X)                                                                             \
  X(no_gradients, ARGUMENT, a->gradients = NULL)                                                   \
  X(no_dy, ARGUMENT, a->want.dy = NULL)                                                            \
  X(odd_dy, ARGUMENT, a->want.dy = shifted(a->want.dy))                                            \
  X(other_dy, ARGUMENT, a->want.dy_dtype = 99)                                                     \
  X(other_dx, ARGUMENT, a->want.dx_dtype = 99)                                                     \
  X(odd_dx, ARGUMENT, a->want.dx = shifted(a->want.dx))                                            \
  X(odd_dweights, ARGUMENT, a->want.dweights = shifted(a->want.dweights))                          \
  X(odd_gradient, ARGUMENT, a->want.up_b = shifted(a->want.up_b))                                  \
  X(no_saved, ARGUMENT, a->m.saved = NULL)                                                         \
  X(without_lora, ARGUMENT, a->lora = NULL)                                                        \
  X(without_gate, ARGUMENT, a->p.lora.gate_a = a->p.lora.gate_b = NULL)                            \
  X(of_int8, ARGUMENT, a->p.moe.layout = kinds[INT8].layout, a->p.moe.hidden = 64,                 \
    a->p.moe.parts = 1)                                                                            \
  X(gate_of_ungated, ARGUMENT, take_gate(a))                                                       \
  X(other_rounding, ARGUMENT, a->want.lora_bf16 = 2)                                               \
  X(rounded_floats, ARGUMENT, a->want.lora_bf16 = 1, a->p.lora.dtype = KT_F32)

#define MAKES(name, status, ...)                                                                   \
  static void name(arguments *a) { __VA_ARGS__; }
OF_BOTH(MAKES)
OF_FORWARD(MAKES)
OF_BACKWARD(MAKES)

typedef struct refusal {
  const char *name;
  void (*make)(arguments *a);
  kt_status status;
} refusal;
#define ROW(name, status, ...) {#name, name, KT_ERR_##status},
static const refusal of_both[] = {OF_BOTH(ROW)};
static const refusal of_forward[] = {OF_FORWARD(ROW)};
static const refusal of_backward[] = {OF_BACKWARD(ROW)};

/* The status, and nothing written. */
static void check_refusal(const refusal *r, kt_status (*function)(const arguments *)) {
  arguments a;
  make_arguments(&a);
  spoil(&a.p, &a.r);
  const problem p = a.p;
  r->make(&a);
  const kt_status status = function(&a);
  if (status != r->status) {
    printf("FAILED: %s gives %s\n", r->name, kt_strerror(status));
    failures++;
  }
  const result untouched = make_result(&p, -1);
  spoil(&p, &untouched);
  expect_same(&small, &p, &untouched, &a.r, r->name);
  release_result(&p, &untouched);
  release_result(&p, &a.r);
  free_problem(&p);
}

static void check_refusals(void) {
  for (size_t i = 0; i < sizeof of_both / sizeof *of_both; i++) {
    check_refusal(of_both + i, go_forward);
    check_refusal(of_both + i, go_backward);
  }
  for (size_t i = 0; i < sizeof of_forward / sizeof *of_forward; i++)
    check_refusal(of_forward + i, go_forward);
  for (size_t i = 0; i < sizeof of_backward / sizeof *of_backward; i++)
    check_refusal(of_backward + i, go_backward);
}

/* ---- No token, and sizes ------------------------------------------------------------------- */

static void check_sizes(void) {
  arguments a;
  make_arguments(&a);
  a.p.call.tokens = 0, a.p.call.x = NULL, a.p.call.y = NULL, a.want.dy_dtype = KT_F32;
  spoil(&a.p, &a.r);
  if (go_forward(&a) != KT_OK || go_backward(&a) != KT_OK) failures++;
  for (int which = GATE_A; which < GRADIENTS; which++)
    for (int64_t i = 0; i < count_of(&a.p, which); i++)
      if (value_at(KT_F32, a.r.gradient[which], i) != 0.0f) failures++;
  if (kt_train_saved_size(a.moe, a.lora, -1, TOP_K) || kt_train_saved_size(NULL, NULL, 1, 1) ||
      kt_train_scratch_size(a.moe, a.lora, 1, TOP_K, NULL) ||
      kt_train_scratch_size(a.moe, a.lora, 1, 0, pool))
    failures++;
  if (kt_train_saved_size(a.moe, a.lora, INT64_MAX / 8 >> 20, 1 << 19)) failures++;
  if (kt_train_scratch_size(a.moe, a.lora, BATCH, TOP_K, pool) !=
      kt_train_scratch_size(a.moe, a.lora, (int64_t)1 << 40, TOP_K, pool))
    failures++;
  free_problem(&a.p);
}

int main(void) {
  static const int32_t nodes[] = {0, 0, 1};
  if (kt_pool_create(3, NULL, nodes, &pool) != KT_OK) return 2;
  check_selections(&(trial){.kind = BF16,
                            .activation = SILU,
                            .biased = 1,
                            .hidden = 32,
                            .width = 32,
                            .parts = 2,
                            .tokens = 3,
                            .rank = 3,
                            .adapted = FOR_ALL,
                            .dropout = 0.5f,
                            .lora_dtype = KT_F32,
                            .x_dtype = KT_F32,
                            .y_dtype = KT_F32,
                            .dy_dtype = KT_F32,
                            .dx_dtype = KT_F32,
                            .id_size = 8});
  check_batches();
  check_refusals();
  check_sizes();
  kt_pool_destroy(pool);
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
