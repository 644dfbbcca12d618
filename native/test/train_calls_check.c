/* train_calls_check.c - how fine-tuning is called: what is wanted, batches, refusals.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/train_calls_check.c -lm -pthread && ./a.out
 *
 * All memory ends at unreadable pages. Exit code: 0 all passed, 1 something differed, 2 no
 * memory. */
#define _GNU_SOURCE
#include "train_problem.h"

#define SILU {KT_SWIGLU, 1.0f, 0.0f, INFINITY}

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

/* One wrong thing. */
typedef void wrong(arguments *a);
#define WRONG(name, what)                                                                          \
  static void name(arguments *a) { what; }

WRONG(no_moe, a->moe = NULL)
WRONG(no_pool, a->pool = NULL)
WRONG(no_call, a->call = NULL)
WRONG(no_experts, a->p.moe.expert = NULL)
WRONG(odd_parts, a->p.moe.parts = 3)
WRONG(odd_hidden, a->p.moe.hidden = 33)
WRONG(no_function, a->p.moe.activation.function = 99)
WRONG(nan_limit, a->p.moe.activation.limit = NAN)
WRONG(few_tokens, a->p.call.tokens = -1)
WRONG(many_tokens, a->p.call.tokens = INT64_MAX)
WRONG(no_choice, a->p.call.top_k = 0)
WRONG(no_x, a->p.call.x = NULL)
WRONG(odd_x, a->p.call.x = shifted(a->p.call.x))
WRONG(other_x, a->p.call.x_dtype = 99)
WRONG(no_ids, a->p.call.ids = NULL)
WRONG(other_ids, a->p.call.id_size = 2)
WRONG(no_weights, a->p.call.weights = NULL)
WRONG(rank_0, a->p.lora.rank = 0)
WRONG(rank_1025, a->p.lora.rank = KT_MAX_RANK + 1)
WRONG(inf_scale, a->p.lora.scale = INFINITY)
WRONG(inf_factor, (a->p.lora.scale = 3e38f, a->p.lora.dropout = 0.5f))
WRONG(dropout_1, a->p.lora.dropout = 1.0f)
WRONG(dropout_minus, a->p.lora.dropout = -0.5f)
WRONG(dropout_nan, a->p.lora.dropout = NAN)
WRONG(half_lora, a->p.lora.dtype = KT_F16)
WRONG(no_gate_b, a->p.lora.gate_b = NULL)
WRONG(no_up_a, a->p.lora.up_a = NULL)
WRONG(no_down_b, a->p.lora.down_b = NULL)
WRONG(odd_down_a, a->p.lora.down_a = shifted(a->p.lora.down_a))
WRONG(ungated_lora, a->p.moe.activation.function = KT_RELU2)
WRONG(no_scratch, a->m.scratch = NULL)
WRONG(odd_scratch, a->m.scratch = shifted(a->m.scratch))
WRONG(odd_saved, a->m.saved = shifted(a->m.saved))
WRONG(little_scratch, a->m.scratch_size = 64)
WRONG(no_up, a->p.experts[0].up = NULL)
WRONG(no_gate_of_part, a->p.experts[EXPERTS].gate = NULL)
WRONG(bias_of_part, a->p.experts[EXPERTS].down_bias = a->p.call.weights)
/* of a forward */
WRONG(with_add, a->p.call.add = a->p.call.weights)
WRONG(no_y, a->p.call.y = NULL)
WRONG(other_y, a->p.call.y_dtype = 99)
/* of a backward */
WRONG(no_gradients, a->gradients = NULL)
WRONG(no_dy, a->want.dy = NULL)
WRONG(odd_dy, a->want.dy = shifted(a->want.dy))
WRONG(other_dy, a->want.dy_dtype = 99)
WRONG(other_dx, a->want.dx_dtype = 99)
WRONG(odd_dx, a->want.dx = shifted(a->want.dx))
WRONG(odd_dweights, a->want.dweights = shifted(a->want.dweights))
WRONG(odd_gradient, a->want.up_b = shifted(a->want.up_b))
WRONG(other_rounding, a->want.lora_bf16 = 2)
WRONG(rounded_floats, (a->want.lora_bf16 = 1, a->p.lora.dtype = KT_F32))
WRONG(no_saved, a->m.saved = NULL)
WRONG(without_lora, a->lora = NULL)
WRONG(without_gate, a->p.lora.gate_a = a->p.lora.gate_b = NULL)
WRONG(of_int8, (a->p.moe.layout = kinds[INT8].layout, a->p.moe.hidden = 64, a->p.moe.parts = 1))

static void gate_of_ungated(arguments *a) {
  a->p.moe.activation.function = KT_RELU2;
  a->p.lora.gate_a = a->p.lora.gate_b = NULL;
  a->want.gate_a = a->want.gate_b = NULL;
  for (int i = 0; i < MOST_PARTS * EXPERTS; i++)
    a->p.experts[i].gate = a->p.experts[i].gate_scale = NULL;
}

typedef struct refusal {
  const char *name;
  wrong *make;
  kt_status status;
} refusal;
#define REFUSED(name, status) {#name, name, KT_ERR_##status}

static const refusal of_both[] = {
    REFUSED(no_moe, ARGUMENT),        REFUSED(no_pool, ARGUMENT),
    REFUSED(no_call, ARGUMENT),       REFUSED(no_experts, ARGUMENT),
    REFUSED(odd_parts, SHAPE),        REFUSED(odd_hidden, SHAPE),
    REFUSED(no_function, ARGUMENT),   REFUSED(nan_limit, ARGUMENT),
    REFUSED(few_tokens, ARGUMENT),    REFUSED(many_tokens, ARGUMENT),
    REFUSED(no_choice, ARGUMENT),     REFUSED(no_x, ARGUMENT),
    REFUSED(odd_x, ARGUMENT),         REFUSED(other_x, ARGUMENT),
    REFUSED(no_ids, ARGUMENT),        REFUSED(other_ids, ARGUMENT),
    REFUSED(no_weights, ARGUMENT),    REFUSED(rank_0, ARGUMENT),
    REFUSED(rank_1025, ARGUMENT),     REFUSED(inf_scale, ARGUMENT),
    REFUSED(inf_factor, ARGUMENT),    REFUSED(dropout_1, ARGUMENT),
    REFUSED(dropout_minus, ARGUMENT), REFUSED(dropout_nan, ARGUMENT),
    REFUSED(half_lora, ARGUMENT),     REFUSED(no_gate_b, ARGUMENT),
    REFUSED(no_up_a, ARGUMENT),       REFUSED(no_down_b, ARGUMENT),
    REFUSED(odd_down_a, ARGUMENT),    REFUSED(ungated_lora, ARGUMENT),
    REFUSED(no_scratch, ARGUMENT),    REFUSED(odd_scratch, ARGUMENT),
    REFUSED(odd_saved, ARGUMENT),     REFUSED(little_scratch, SCRATCH),
    REFUSED(no_up, EXPERT),           REFUSED(no_gate_of_part, EXPERT),
    REFUSED(bias_of_part, ARGUMENT)};

static const refusal of_forward[] = {REFUSED(with_add, ARGUMENT), REFUSED(no_y, ARGUMENT),
                                     REFUSED(other_y, ARGUMENT)};

static const refusal of_backward[] = {
    REFUSED(no_gradients, ARGUMENT),    REFUSED(no_dy, ARGUMENT),
    REFUSED(odd_dy, ARGUMENT),          REFUSED(other_dy, ARGUMENT),
    REFUSED(other_dx, ARGUMENT),        REFUSED(odd_dx, ARGUMENT),
    REFUSED(odd_dweights, ARGUMENT),    REFUSED(odd_gradient, ARGUMENT),
    REFUSED(no_saved, ARGUMENT),        REFUSED(without_lora, ARGUMENT),
    REFUSED(without_gate, ARGUMENT),    REFUSED(of_int8, ARGUMENT),
    REFUSED(gate_of_ungated, ARGUMENT), REFUSED(other_rounding, ARGUMENT),
    REFUSED(rounded_floats, ARGUMENT)};

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
