/* moe_check.c - whole MoE layers of every kernel on every level, without Python.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/moe_check.c native/test/amx_emulator.c \
 *      -lm -pthread && ./a.out
 *
 * Weights, scales, inputs, outputs and scratch end at unreadable pages. Levels are compared with
 * scalar: bit by bit where the kernel promises it, else within a bound. With the emulator linked
 * in, AMX runs on any x86-64 CPU with AVX-512 BF16. Exit code: 0 all passed, 1 something
 * differed, 2 no memory. */
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
    {"int8", {KT_KERNEL_INT8, 0, KT_SCALE_F32}, 1},
    {"int4", {KT_KERNEL_INT4, 0, KT_SCALE_F32}, 1},
    {"bf16", {KT_KERNEL_BF16, 0, KT_SCALE_NONE}, 0},
    {"fp8", {KT_KERNEL_FP8, 128, KT_SCALE_F32}, 0},
    {"fp8 per row", {KT_KERNEL_FP8, 0, KT_SCALE_F32}, 0},
    {"mxfp4", {KT_KERNEL_MXFP4, 32, KT_SCALE_UE8M0}, 0},
    {"gint4 32", {KT_KERNEL_GINT4, 32, KT_SCALE_BF16}, 1},
    {"gint4 128", {KT_KERNEL_GINT4, 128, KT_SCALE_F32}, 1},
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

static float wide(uint16_t half) {
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* A code as the layout's checkpoints store it; for nibbles, two of them. */
static void draw_codes(const kt_layout *layout, uint8_t *codes, int64_t elements) {
  for (int64_t i = 0; i < elements; i++) {
    const uint8_t byte = (uint8_t)draw();
    switch (layout->kernel) {
    case KT_KERNEL_INT8: codes[i] = byte == 0x80 ? 0 : byte; break;
    case KT_KERNEL_INT4: codes[i] = (uint8_t)(byte % 15 - 7); break;
    case KT_KERNEL_BF16: ((uint16_t *)(void *)codes)[i] = bf16(unit() / 16); break;
    case KT_KERNEL_FP8: codes[i] = (byte & 0x7f) > 0x50 ? byte & 0xbf : byte; break;
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

static void make_matrix(const kt_layout *layout, int64_t rows, int64_t cols, const void **codes,
                        const void **scale) {
  uint8_t *source = malloc((size_t)(rows * cols) * 2);
  void *source_scale = malloc((size_t)(rows * cols) * 4);
  void *packed = guarded(kt_weight_size(layout, rows, cols));
  void *packed_scale = guarded(kt_weight_scale_size(layout, rows, cols) + 4);
  if (!source || !source_scale) exit(2);
  draw_codes(layout, source, rows * cols);
  draw_scales(layout, source_scale, rows * cols);
  if (kt_weight_pack(layout, rows, cols, source, source_scale, packed, packed_scale) != KT_OK)
    failures++;
  free(source);
  free(source_scale);
  *codes = packed;
  *scale = packed_scale;
}

static void make_expert(const kt_moe *moe, kt_expert *e) {
  const int64_t width = moe->intermediate / moe->parts;
  memset(e, 0, sizeof *e);
  make_matrix(&moe->layout, width, moe->hidden, &e->gate, &e->gate_scale);
  make_matrix(&moe->layout, width, moe->hidden, &e->up, &e->up_scale);
  make_matrix(&moe->layout, moe->hidden, width, &e->down, &e->down_scale);
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

static void forward(const kt_moe *moe, kt_pool *pool, const batch *b) {
  const size_t size = kt_moe_scratch_size(moe, b->tokens, TOP_K, pool);
  void *scratch = guarded(size);
  if (size % 64) failures++;
  const kt_status status =
      kt_moe_forward(moe, pool, b->tokens, TOP_K, b->x, b->ids, 8, b->weights, b->y, scratch, size);
  if (status != KT_OK) {
    printf("FAILED: %s\n", kt_strerror(status));
    failures++;
  }
}

static double difference(const uint16_t *a, const uint16_t *b, int64_t count) {
  double squares = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    squares += pow((double)wide(a[i]) - (double)wide(b[i]), 2);
    size += pow((double)wide(b[i]), 2);
  }
  return sqrt(squares / (size > 0 ? size : 1));
}

static void compare_levels(const kind *k, const kt_moe *moe, kt_pool *pool, const batch *b) {
  const int64_t count = b->tokens * moe->hidden;
  uint16_t *expected = malloc((size_t)count * sizeof *expected);
  if (!expected) exit(2);
  for (int level = KT_ISA_SCALAR; level <= kt_isa_available(); level++) {
    kt_isa_use(level);
    forward(moe, pool, b);
    if (level == KT_ISA_SCALAR) memcpy(expected, b->y, (size_t)count * sizeof *expected);
    const double error = difference(b->y, expected, count);
    if (!(error <= (k->exact ? 0.0 : 0.004))) {
      printf("FAILED: %s, level %d, %d tokens, %d x %d in %d parts: %g from scalar\n", k->name,
             level, (int)b->tokens, (int)moe->hidden, (int)moe->intermediate, (int)moe->parts,
             error);
      failures++;
    }
  }
  free(expected);
}

static void check_layer(const kind *k, int64_t hidden, int64_t intermediate, int64_t parts,
                        kt_pool *pool) {
  static const int64_t tokens[] = {1, 2, 5, 13, 33, MOST_TOKENS};
  kt_expert experts[MOST_PARTS * EXPERTS];
  const kt_moe moe = {.layout = k->layout,
                      .activation = {KT_SWIGLU, 1.0f, 0.0f, INFINITY},
                      .hidden = hidden,
                      .intermediate = intermediate,
                      .experts = EXPERTS,
                      .parts = parts,
                      .expert = experts};
  for (int64_t i = 0; i < parts * EXPERTS; i++) make_expert(&moe, experts + i);
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
    const batch b = make_batch(tokens[i], hidden);
    compare_levels(k, &moe, pool, &b);
  }
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
    check_layer(kinds + i, 256, 128, 1, pool);
    check_layer(kinds + i, 128, 768, 2, pool);
  }
  kt_pool_destroy(pool);
  printf("%d failures on %d levels\n", failures, kt_isa_available() + 1);
  return failures != 0;
}
