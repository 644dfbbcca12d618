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
#include "ktconv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { EXPERTS = 3, TOP_K = 2, MOST_PARTS = 2, MOST_TOKENS = 100 };

typedef struct kind {
  const char *name;
  kt_layout layout;
  int exact; /* the same bits on every level */
} kind;

static const kind kinds[] = {
    {"int8", {KT_FORMAT_INT8, 0, KT_SCALE_F32}, 1},
    {"int4", {KT_FORMAT_INT4, 0, KT_SCALE_F32}, 1},
    {"bf16", {KT_FORMAT_BF16, 0, KT_SCALE_NONE}, 0},
    {"fp8", {KT_FORMAT_FP8, 128, KT_SCALE_F32}, 0},
    {"fp8 per row", {KT_FORMAT_FP8, 0, KT_SCALE_F32}, 0},
    {"mxfp4", {KT_FORMAT_MXFP4, 32, KT_SCALE_UE8M0}, 0},
    {"gint4 32", {KT_FORMAT_GINT4, 32, KT_SCALE_BF16}, 1},
    {"gint4 128", {KT_FORMAT_GINT4, 128, KT_SCALE_F32}, 1},
};

/* One with a number for everything that its formula has. */
static const kt_activation silu = {KT_SWIGLU, 1.0f, 0.0f, INFINITY},
                           others[] = {
                               {KT_RELU2, 0.0f, 0.0f, 2.0f},
                               {KT_SWIGLU, 1.702f, 1.0f, 0.5f},
                               {KT_GELU, 0.0f, 0.0f, 1.0f},
                               {KT_GELU_TANH, 0.0f, 0.0f, 1.0f},
                               {KT_SWIGLU_CLAMPED, 0.0f, 0.0f, 0.25f},
                               {KT_SOFTCAP, 0.5f, 2.0f, INFINITY},
                               {KT_RELU, 0.0f, 0.0f, 0.5f},
                               {KT_UNGATED_GELU, 0.0f, 0.0f, 1.0f},
                               {KT_UNGATED_GELU_TANH, 0.0f, 0.0f, INFINITY},
                           };

static int failures;

static uint64_t state = 1;

static uint64_t draw(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

/* `size` bytes that end at an unreadable page; never freed, except by the end of the program. */
static void *guarded(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (size + page - 1) / page * page;
  uint8_t *memory =
      mmap(NULL, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory + inner, page, PROT_NONE) != 0) exit(2);
  return memory + inner - size;
}

static float unit(void) { return (float)(draw() >> 40) / 16777216.0f * 2.0f - 1.0f; }

static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static uint16_t nearest_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float wide(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* ---- Weights and what they stand for -------------------------------------- */

/* A code as the layout's checkpoints store it; for nibbles, two of them. */
static void draw_codes(const kt_layout *layout, uint8_t *codes, int64_t elements) {
  for (int64_t i = 0; i < elements; i++) {
    const uint8_t byte = (uint8_t)draw();
    switch (layout->format) {
    case KT_FORMAT_INT8: codes[i] = byte == 0x80 ? 0 : byte; break;
    case KT_FORMAT_INT4: codes[i] = (uint8_t)(byte % 15 - 7); break;
    case KT_FORMAT_BF16: ((uint16_t *)(void *)codes)[i] = bf16(unit() / 16); break;
    case KT_FORMAT_FP8: codes[i] = (byte & 0x7f) > 0x50 ? byte & 0xbf : byte; break;
    default: codes[i / 2] = byte;
    }
  }
}

static void draw_scales(const kt_layout *layout, void *scale, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const float value = 0.004f * (1.5f + unit());
    if (layout->scale_dtype == KT_SCALE_F32) ((float *)scale)[i] = value;
    if (layout->scale_dtype == KT_SCALE_BF16) ((uint16_t *)scale)[i] = bf16(value);
    if (layout->scale_dtype == KT_SCALE_UE8M0) ((uint8_t *)scale)[i] = (uint8_t)(116 + draw() % 4);
  }
}

static float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size =
      exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
  return code & 0x80 ? -size : size;
}

/* Element i of row-major codes, without its scale. */
static float code_value(const kt_layout *layout, const uint8_t *codes, int64_t i) {
  static const float e2m1[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const int nibble = codes[i / 2] >> (i % 2 * 4) & 15;
  switch (layout->format) {
  case KT_FORMAT_INT8: return (float)((const int8_t *)codes)[i];
  case KT_FORMAT_INT4: return 16.0f * (float)((const int8_t *)codes)[i];
  case KT_FORMAT_BF16: return wide(((const uint16_t *)(const void *)codes)[i]);
  case KT_FORMAT_FP8: return e4m3(codes[i]);
  case KT_FORMAT_MXFP4: return nibble & 8 ? -e2m1[nibble & 7] : e2m1[nibble];
  default: return (float)(nibble - 8);
  }
}

/* The scale of row n, column k of [rows, cols]. */
static float scale_value(const kt_layout *layout, const void *scale, int64_t cols, int64_t n,
                         int64_t k) {
  const int64_t row = layout->format == KT_FORMAT_FP8 && layout->group ? n / layout->group : n;
  const int64_t at = layout->group ? row * (cols / layout->group) + k / layout->group : row;
  switch (layout->scale_dtype) {
  case KT_SCALE_F32: return ((const float *)scale)[at];
  case KT_SCALE_BF16: return wide(((const uint16_t *)scale)[at]);
  case KT_SCALE_UE8M0: return ldexpf(1.0f, ((const uint8_t *)scale)[at] - 127);
  default: return 1.0f;
  }
}

/* Packs a random matrix; returns its values [rows, cols]. */
static float *make_matrix(const kt_layout *layout, int64_t rows, int64_t cols, const void **codes,
                          const void **scale) {
  uint8_t *source = malloc((size_t)(rows * cols) * 2);
  void *source_scale = malloc((size_t)(rows * cols) * 4);
  void *packed = guarded(kt_packed_size(layout, rows, cols));
  void *packed_scale = guarded(kt_scale_size(layout, rows, cols) + 4);
  float *values = malloc((size_t)(rows * cols) * sizeof *values);
  if (!source || !source_scale || !values) exit(2);
  draw_codes(layout, source, rows * cols);
  draw_scales(layout, source_scale, rows * cols);
  if (kt_pack(layout, rows, cols, source, source_scale, packed, packed_scale) != KT_OK) failures++;
  for (int64_t i = 0; i < rows * cols; i++)
    values[i] =
        code_value(layout, source, i) * scale_value(layout, source_scale, cols, i / cols, i % cols);
  free(source);
  free(source_scale);
  *codes = packed;
  *scale = packed_scale;
  return values;
}

static float *make_bias(int64_t rows) {
  float *bias = guarded((size_t)rows * sizeof *bias);
  for (int64_t i = 0; i < rows; i++) bias[i] = unit();
  return bias;
}

/* Values of the matrices of an expert of one part; no gate: NULL. */
typedef struct expert_values {
  float *gate, *up, *down;
  const kt_expert *biases;
} expert_values;

static expert_values make_expert(const kt_moe *moe, int biased, int64_t part, kt_expert *e) {
  const int64_t width = moe->intermediate / moe->parts;
  const int gated = kt_function_has_gate(moe->activation.function);
  memset(e, 0, sizeof *e);
  if (biased && gated) e->gate_bias = make_bias(width);
  if (biased) e->up_bias = make_bias(width);
  if (biased && part == 0) e->down_bias = make_bias(moe->hidden);
  return (expert_values){
      .gate =
          gated ? make_matrix(&moe->layout, width, moe->hidden, &e->gate, &e->gate_scale) : NULL,
      .up = make_matrix(&moe->layout, width, moe->hidden, &e->up, &e->up_scale),
      .down = make_matrix(&moe->layout, moe->hidden, width, &e->down, &e->down_scale),
      .biases = e,
  };
}

static void free_values(expert_values v) {
  free(v.gate);
  free(v.up);
  free(v.down);
}

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

/* Activations as the format rounds them: bf16, or int8 with a scale per row or group. */
static void round_row(const kt_layout *layout, float *x, int64_t n) {
  const int integer = layout->format == KT_FORMAT_INT8 || layout->format == KT_FORMAT_INT4 ||
                      layout->format == KT_FORMAT_GINT4;
  const int64_t run = layout->format == KT_FORMAT_GINT4 ? layout->group : n;
  for (int64_t first = 0; first < n; first += run) {
    float most = 0;
    for (int64_t i = first; i < first + run; i++) most = fmaxf(most, fabsf(x[i]));
    for (int64_t i = first; i < first + run; i++)
      x[i] = integer ? rintf(x[i] * (127.0f / most)) * (most / 127.0f) : wide(nearest_bf16(x[i]));
  }
}

static float dot(const float *a, const float *b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static float gelu(float x) { return x * (1.0f + erff(x * sqrtf(0.5f))) / 2.0f; }

static float gelu_tanh(float x) {
  return x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))) / 2.0f;
}

static float activated(const kt_activation *a, float gate, float up) {
  const float g = fminf(gate, a->limit), u = fmaxf(fminf(up, a->limit), -a->limit);
  switch (a->function) {
  case KT_GELU: return gelu(g) * u;
  case KT_GELU_TANH: return gelu_tanh(g) * u;
  case KT_RELU2: return u > 0.0f ? u * u : 0.0f;
  case KT_RELU: return u > 0.0f ? u : 0.0f;
  case KT_UNGATED_GELU: return gelu(u);
  case KT_UNGATED_GELU_TANH: return gelu_tanh(u);
  case KT_SWIGLU_CLAMPED: return fminf(gate * sigmoid(gate), a->limit) * u;
  case KT_SOFTCAP:
    return a->alpha * tanhf(g / a->alpha) * sigmoid(g) * a->beta * tanhf(u / a->beta);
  default: return g * sigmoid(a->alpha * g) * (u + a->beta);
  }
}

static float bias_of(const float *bias, int64_t row) { return bias ? bias[row] : 0.0f; }

/* y += weight * expert(x) for one part of an expert; middle: working memory [w]. */
static void add_expert(const kt_moe *moe, const expert_values *v, const float *x, float weight,
                       float *middle, float *y) {
  const int64_t hidden = moe->hidden, width = moe->intermediate / moe->parts;
  for (int64_t i = 0; i < width; i++) {
    const float g = v->gate ? dot(v->gate + i * hidden, x, hidden) : 0.0f;
    const float u = dot(v->up + i * hidden, x, hidden);
    middle[i] = activated(&moe->activation, g + bias_of(v->biases->gate_bias, i),
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
    const size_t functions = i < 3 ? sizeof others / sizeof *others : 1;
    for (size_t f = 0; f < functions; f++) check_layer(kinds + i, others + f, 1, 128, 256, 2, pool);
  }
  kt_pool_destroy(pool);
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
