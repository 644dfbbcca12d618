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

enum { EXPERTS = 3, TOP_K = 2, MOST_PARTS = 2, MOST_TOKENS = 100 };

typedef struct batch {
  int64_t tokens;
  uint16_t *x, *y;
  int64_t *ids;
  float *weights;
} batch;

static batch make_batch(int64_t tokens, int64_t hidden) {
  batch b = {.tokens = tokens};
  b.x = guarded((size_t)(tokens * hidden) * sizeof *b.x);
  b.y = guarded((size_t)(tokens * hidden) * sizeof *b.y);
  b.ids = guarded((size_t)(tokens * TOP_K) * sizeof *b.ids);
  b.weights = guarded((size_t)(tokens * TOP_K) * sizeof *b.weights);
  for (int64_t i = 0; i < tokens * hidden; i++) b.x[i] = bf16(unit());
  for (int64_t i = 0; i < tokens * TOP_K; i++) {
    b.ids[i] = (int64_t)(draw() % (EXPERTS + 1)) - 1;
    b.weights[i] = unit();
  }
  return b;
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

static float dot(const float *a, const float *b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
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

static void compare_levels(const kind *k, const kt_moe *moe, const expert_values *values,
                           kt_pool *pool, const batch *b) {
  const int64_t count = b->tokens * moe->hidden;
  uint16_t *expected = malloc((size_t)count * sizeof *expected);
  if (!expected) exit(2);
  compute_truth(moe, values, b, expected);
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    const int level = kt_isa_at(i);
    kt_isa_use(level);
    forward(moe, pool, b);
    const double error = difference(b->y, expected, count);
    const double bound = level != KT_ISA_SCALAR && k->exact ? 0.0 : 0.005;
    if (!(error <= bound)) {
      printf("FAILED: %s, level %s, %d tokens, %d x %d in %d parts, function %d: %g from %s\n",
             k->name, kt_isa_name(level), (int)b->tokens, (int)moe->hidden, (int)moe->intermediate,
             (int)moe->parts, (int)moe->activation.function, error,
             level != KT_ISA_SCALAR ? "scalar" : "the truth");
      failures++;
    }
    if (level == KT_ISA_SCALAR) memcpy(expected, b->y, (size_t)count * sizeof *expected);
  }
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
    compare_levels(k, &moe, values, pool, &b);
    if (i == 1) compare_calls(&moe, pool, &b);
  }
  for (int64_t i = 0; i < parts * EXPERTS; i++) free_values(values[i]);
  if (kt_moe_touch(&moe, pool) != KT_OK) failures++;
}

int main(void) {
  static const int32_t nodes[] = {0, 0, 1};
  kt_pool *pool;
#if defined(__x86_64__)
  kt_cpu cpu;
  kt_cpu_detect(&cpu);
  if (cpu.avx512_bf16 && !cpu.amx_tile) setenv("KTCONV_ASSUME", "amx", 0);
#endif
  if (kt_pool_create(3, NULL, nodes, &pool) != KT_OK) return 2;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    check_layer(kinds + i, &silu, 0, 256, 128, 1, pool);
    check_layer(kinds + i, &silu, 0, 128, 768, 2, pool);
    /* Functions do not know formats: all with one of these, and of each other one another. */
    const size_t number = sizeof others / sizeof *others, first = i ? i % number : 0;
    for (size_t f = first; f < (i ? first + 1 : number); f++)
      check_layer(kinds + i, others + f, 1, 128, 256, 2, pool);
  }
  kt_pool_destroy(pool);
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
