/* moe_check.c - whole MoE layers of every kernel on every level, without Python.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/moe_check.c native/test/amx_emulator.c \
 *      -lm -pthread && ./a.out
 *
 * Weights, scales, inputs, outputs and scratch end at unreadable pages. Scalar is compared with
 * plain loops that share nothing with the library, other levels with scalar: bit by bit where the
 * kernel promises it, else within a bound. With the emulator linked in, AMX runs on any x86-64 CPU
 * with AVX-512 BF16. Exit code: 0 all passed, 1 something differed, 2 no memory. */
#define _GNU_SOURCE
#include "layers.h"

#include <stdio.h>

enum { EXPERTS = 3, TOP_K = 2, MOST_PARTS = 2, MOST_TOKENS = 100, POOLS = 3 };

typedef struct batch {
  int64_t tokens;
  uint16_t *x, *y;
  int64_t *ids;
  float *weights;
} batch;

/* Memory, and x and weights; nobody's ids yet. */
static batch make_tokens(int64_t tokens, int64_t hidden) {
  batch b = {.tokens = tokens};
  b.x = guarded((size_t)(tokens * hidden) * sizeof *b.x);
  b.y = guarded((size_t)(tokens * hidden) * sizeof *b.y);
  b.ids = guarded((size_t)(tokens * TOP_K) * sizeof *b.ids);
  b.weights = guarded((size_t)(tokens * TOP_K) * sizeof *b.weights);
  for (int64_t i = 0; i < tokens * hidden; i++) b.x[i] = bf16(unit());
  for (int64_t i = 0; i < tokens * TOP_K; i++) b.ids[i] = -1, b.weights[i] = unit();
  return b;
}

static batch make_batch(int64_t tokens, int64_t hidden) {
  const batch b = make_tokens(tokens, hidden);
  for (int64_t i = 0; i < tokens * TOP_K; i++) b.ids[i] = (int64_t)(draw() % (EXPERTS + 1)) - 1;
  return b;
}

/* `of_one` tokens for expert 1, and between them some for the others: its rows are gathered. */
static batch make_crowd(int64_t of_one, int64_t hidden) {
  const batch b = make_tokens(of_one + of_one / 16, hidden);
  for (int64_t t = 0; t < b.tokens; t++) b.ids[t * TOP_K] = t % 17 != 8 ? 1 : t % 2 * 2;
  return b;
}

static void release_batch(const batch *b, int64_t hidden) {
  release(b->x, (size_t)(b->tokens * hidden) * sizeof *b->x);
  release(b->y, (size_t)(b->tokens * hidden) * sizeof *b->y);
  release(b->ids, (size_t)(b->tokens * TOP_K) * sizeof *b->ids);
  release(b->weights, (size_t)(b->tokens * TOP_K) * sizeof *b->weights);
}

static void run_call(const kt_moe *moe, kt_pool *pool, const kt_moe_call *call) {
  const size_t size = kt_moe_scratch_size(moe, call->tokens, TOP_K, pool);
  void *scratch = guarded(size);
  if (size % 64) failures++;
  const kt_status status = kt_moe_forward(moe, pool, call, scratch, size);
  if (status != KT_OK) {
    printf("FAILED: %s\n", kt_strerror(status));
    failures++;
  }
  release(scratch, size);
}

static void forward(const kt_moe *moe, kt_pool *pool, const batch *b) {
  const kt_moe_call call = {.tokens = b->tokens,
                            .top_k = TOP_K,
                            .x = b->x,
                            .ids = b->ids,
                            .weights = b->weights,
                            .y = b->y,
                            .id_size = 8,
                            .x_dtype = KT_BF16,
                            .y_dtype = KT_BF16};
  run_call(moe, pool, &call);
}

/* ---- The reference ------------------------------------------------------------ */

/* In sums that do not wait for one another; n: a multiple of 4. */
static float dot(const float *a, const float *b, int64_t n) {
  float first = 0, second = 0, third = 0, fourth = 0;
  for (int64_t i = 0; i < n; i += 4) {
    first += a[i] * b[i];
    second += a[i + 1] * b[i + 1];
    third += a[i + 2] * b[i + 2];
    fourth += a[i + 3] * b[i + 3];
  }
  return first + second + (third + fourth);
}

/* y += weight * expert(x) for one part of an expert; middle: working memory [w]. */
static void add_expert(const kt_moe *moe, const expert_values *v, const float *x, float weight,
                       float *middle, float *y) {
  const int64_t hidden = moe->hidden, width = moe->intermediate / moe->parts;
  for (int64_t i = 0; i < width; i++) {
    const float g = v->gate ? dot(v->gate + i * hidden, x, hidden) : 0.0f;
    const float u = dot(v->up + i * hidden, x, hidden);
    middle[i] = (float)activated(&moe->activation, g + bias_of(v->biases->gate_bias, i),
                                 u + bias_of(v->biases->up_bias, i));
  }
  round_row(&moe->layout, middle, width);
  for (int64_t i = 0; i < hidden; i++) {
    const float product = dot(v->down + i * width, middle, width);
    y[i] += weight * (product + bias_of(v->biases->down_bias, i));
  }
}

static void compute_truth(const kt_moe *moe, const expert_values *values, const batch *b,
                          uint16_t *expected) {
  const int64_t hidden = moe->hidden;
  float *x = malloc((size_t)hidden * sizeof *x), *y = malloc((size_t)hidden * sizeof *y);
  float *middle = malloc((size_t)moe->intermediate * sizeof *middle);
  if (!x || !y || !middle) exit(2);
  for (int64_t t = 0; t < b->tokens; t++) {
    for (int64_t i = 0; i < hidden; i++) x[i] = wide(b->x[t * hidden + i]), y[i] = 0;
    round_row(&moe->layout, x, hidden);
    for (int64_t k = t * TOP_K; k < (t + 1) * TOP_K; k++)
      for (int64_t part = 0; b->ids[k] >= 0 && part < moe->parts; part++)
        add_expert(moe, values + part * EXPERTS + b->ids[k], x, b->weights[k], middle, y);
    for (int64_t i = 0; i < hidden; i++) expected[t * hidden + i] = nearest_bf16(y[i]);
  }
  free(x);
  free(y);
  free(middle);
}

static double difference(const uint16_t *a, const uint16_t *b, int64_t count) {
  double squares = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    squares += pow((double)wide(a[i]) - (double)wide(b[i]), 2);
    size += pow((double)wide(b[i]), 2);
  }
  return sqrt(squares / (size > 0 ? size : 1));
}

static void compare_level(const kind *k, const kt_moe *moe, kt_pool *pool, const batch *b,
                          int level, const uint16_t *expected) {
  kt_isa_use(level);
  forward(moe, pool, b);
  const double error = difference(b->y, expected, b->tokens * moe->hidden);
  const double bound = level != KT_ISA_SCALAR && k->exact ? 0.0 : 0.005;
  if (error <= bound) return;
  printf("FAILED: %s, level %s, %d threads, %d tokens, %d x %d in %d parts, function %d: "
         "%g from %s\n",
         k->name, kt_isa_name(level), (int)kt_pool_threads(pool), (int)b->tokens, (int)moe->hidden,
         (int)moe->intermediate, (int)moe->parts, (int)moe->activation.function, error,
         level != KT_ISA_SCALAR ? "scalar" : "the truth");
  failures++;
}

/* On all levels, from scalar on, on each of the pools; scalar on the last. */
static void compare_levels(const kind *k, const kt_moe *moe, const expert_values *values,
                           kt_pool *const *pools, int pool_count, const batch *b) {
  const int64_t count = b->tokens * moe->hidden;
  uint16_t *expected = malloc((size_t)count * sizeof *expected);
  if (!expected) exit(2);
  compute_truth(moe, values, b, expected);
  compare_level(k, moe, pools[pool_count - 1], b, KT_ISA_SCALAR, expected);
  memcpy(expected, b->y, (size_t)count * sizeof *expected);
  for (int i = 1; kt_isa_has(kt_isa_at(i)); i++)
    for (int p = 0; p < pool_count; p++) compare_level(k, moe, pools[p], b, kt_isa_at(i), expected);
  free(expected);
}

/* A call with other dtypes, a mask, ids beyond the experts, and a sum in the place of the result,
 * against one that has -1 for what is left out. */
static void compare_calls(const kt_moe *moe, kt_pool *pool, const batch *b) {
  const size_t count = (size_t)(b->tokens * moe->hidden), slots = (size_t)(b->tokens * TOP_K);
  float *x = guarded(count * sizeof *x), *y = guarded(count * sizeof *y);
  int32_t *ids = guarded(slots * sizeof *ids);
  uint8_t *skip = guarded(EXPERTS);
  memset(skip, 0, EXPERTS);
  skip[1] = 1;
  for (size_t i = 0; i < count; i++) x[i] = wide(b->x[i]), y[i] = 0;
  for (size_t i = 0; i < slots; i++) {
    ids[i] = b->ids[i] < 0 ? EXPERTS + (int32_t)i : (int32_t)b->ids[i];
    if (b->ids[i] == 1) b->ids[i] = -1;
  }
  kt_moe_call call = {.tokens = b->tokens,
                      .top_k = TOP_K,
                      .x = x,
                      .ids = ids,
                      .weights = b->weights,
                      .skip = skip,
                      .add = y,
                      .y = y,
                      .id_size = 4,
                      .x_dtype = KT_F32,
                      .y_dtype = KT_F32};
  forward(moe, pool, b);
  run_call(moe, pool, &call);
  for (size_t i = 0; i < count; i++)
    if (nearest_bf16(y[i]) != b->y[i]) {
      printf("FAILED: element %d of a call in float32 is %g\n", (int)i, (double)y[i]);
      failures++;
      break;
    }
  call.add = NULL, call.y_dtype = KT_F16, call.y = guarded(count * 2);
  run_call(moe, pool, &call);
}

static void check_layer(const kind *k, const kt_activation *activation, int biased, int64_t hidden,
                        int64_t intermediate, int64_t parts, kt_pool *pool) {
  static const int64_t tokens[] = {1, 13, 2, 5, 33, MOST_TOKENS};
  const size_t batches = biased ? 2 : sizeof tokens / sizeof *tokens;
  kt_expert experts[MOST_PARTS * EXPERTS];
  expert_values values[MOST_PARTS * EXPERTS];
  const kt_moe moe = {.layout = k->layout,
                      .activation = *activation,
                      .hidden = hidden,
                      .intermediate = intermediate,
                      .experts = EXPERTS,
                      .parts = parts,
                      .expert = experts};
  for (int64_t i = 0; i < parts * EXPERTS; i++)
    values[i] = make_expert(&moe, biased, i / EXPERTS, experts + i);
  for (size_t i = 0; i < batches; i++) {
    const batch b = make_batch(tokens[i], hidden);
    compare_levels(k, &moe, values, &pool, 1, &b);
    if (i == 1) compare_calls(&moe, pool, &b);
  }
  for (int64_t i = 0; i < parts * EXPERTS; i++) free_values(values[i]);
  if (kt_moe_touch(&moe, pool) != KT_OK) failures++;
}

/* Experts with several blocks of tokens, of which a thread computes one after the other. */
static void check_crowds(const kind *k, int64_t hidden, int64_t width, const int64_t crowds[2],
                         kt_pool *const *pools, int pool_count) {
  kt_expert experts[EXPERTS];
  expert_values values[EXPERTS];
  const kt_moe moe = {.layout = k->layout,
                      .activation = silu,
                      .hidden = hidden,
                      .intermediate = width,
                      .experts = EXPERTS,
                      .parts = 1,
                      .expert = experts};
  for (int64_t i = 0; i < EXPERTS; i++) values[i] = make_expert(&moe, 0, 0, experts + i);
  for (int i = 0; i < 2 && crowds[i]; i++) {
    const batch b = make_crowd(crowds[i], hidden);
    compare_levels(k, &moe, values, pools, pool_count, &b);
    release_batch(&b, hidden);
  }
  for (int64_t i = 0; i < EXPERTS; i++) free_values(values[i]);
}

/* Blocks of up to KT_STREAM_TOKENS; and of as many as have 1 MB of activations, which depends on
 * the kind of rows alone: one format of each. */
static void check_blocks(const kind *k, kt_pool *const *pools) {
  static const int64_t many[2] = {300, 97}, few[2] = {140, 0};
  check_crowds(k, 128, 128, many, pools, 2);
  if (k == kinds + INT8 || k == kinds + GINT8_64 || k == kinds + BF16)
    check_crowds(k, 7168, 64, few, pools, 1);
}

int main(void) {
  static const int32_t nodes[POOLS][POOLS] = {{0}, {0, 0}, {0, 0, 1}};
  kt_pool *pools[POOLS];
  assume_amx();
  for (int i = 0; i < POOLS; i++)
    if (kt_pool_create(i + 1, NULL, nodes[i], pools + i) != KT_OK) return 2;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    kt_pool *const pool = pools[POOLS - 1];
    check_blocks(kinds + i, pools);
    check_layer(kinds + i, &silu, 0, 256, 128, 1, pool);
    check_layer(kinds + i, &silu, 0, 128, 768, 2, pool);
    /* Functions do not know formats: all with one of these, and of each other one another. */
    const size_t number = sizeof others / sizeof *others, first = i ? i % number : 0;
    for (size_t f = first; f < (i ? first + 1 : number); f++)
      check_layer(kinds + i, others + f, 1, 128, 256, 2, pool);
  }
  for (int i = 0; i < POOLS; i++) kt_pool_destroy(pools[i]);
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
