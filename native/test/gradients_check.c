/* gradients_check.c - what a backward pass does besides matrix products, without Python.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/gradients_check.c native/test/amx_emulator.c \
 *      -lm -pthread && ./a.out
 *
 * Derivatives of scalar are compared with formulas in binary64, other levels with scalar, bit by
 * bit. Arrays end at unreadable pages. Exit code: 0 all passed, 1 something differed, 2 no
 * memory. */
#define _GNU_SOURCE
#include "../src/train/gradients.h"
#include "basics.h"

#include <stdio.h>

static void failed(const char *what, int a, int64_t b, float found) {
  if (failures++ < 40)
    printf("FAILED: %s, level %s, %d, %d: %g\n", what, kt_isa_name(kt_isa_active()), a, (int)b,
           (double)found);
}

/* ---- Derivatives ------------------------------------------------------------ */

static const kt_activation activations[] = {
    {KT_SWIGLU, 1.0f, 0.0f, INFINITY},
    {KT_SWIGLU, 1.702f, 1.0f, 7.0f},
    {KT_SWIGLU, 1.0f, 0.0f, 0.5f},
    {KT_GELU, 0.0f, 0.0f, INFINITY},
    {KT_GELU, 0.0f, 0.0f, 1.0f},
    {KT_GELU_TANH, 0.0f, 0.0f, INFINITY},
    {KT_GELU_TANH, 0.0f, 0.0f, 2.0f},
    {KT_RELU2, 0.0f, 0.0f, INFINITY},
    {KT_RELU2, 0.0f, 0.0f, 2.0f},
    {KT_SWIGLU_CLAMPED, 0.0f, 0.0f, INFINITY},
    {KT_SWIGLU_CLAMPED, 0.0f, 0.0f, 0.25f},
    {KT_SOFTCAP, 4.0f, 25.0f, INFINITY},
    {KT_SOFTCAP, 0.5f, 2.0f, 3.0f},
    {KT_SOFTCAP, INFINITY, INFINITY, INFINITY},
    {KT_RELU, 0.0f, 0.0f, INFINITY},
    {KT_RELU, 0.0f, 0.0f, 0.5f},
    {KT_UNGATED_GELU, 0.0f, 0.0f, INFINITY},
    {KT_UNGATED_GELU, 0.0f, 0.0f, 1.0f},
    {KT_UNGATED_GELU_TANH, 0.0f, 0.0f, INFINITY},
    {KT_UNGATED_GELU_TANH, 0.0f, 0.0f, 0.0f},
};
enum { ACTIVATIONS = sizeof activations / sizeof *activations };

static double clamped(double x, double low, double high) { return fmin(fmax(x, low), high); }

/* value and slope of a function of one number */
typedef struct number {
  double value, slope;
} number;

static number sigmoid_of(double x) {
  const double e = exp(-fabs(x)), s = x < 0 ? e / (1 + e) : 1 / (1 + e);
  return (number){s, e / ((1 + e) * (1 + e))};
}

/* x times a function that goes to 0 where x goes to -infinity */
static number times(double x, number f) {
  return (number){x * f.value, f.value + (f.slope == 0 ? 0 : x * f.slope)};
}

static number swish_of(double alpha, double g) {
  const number s = sigmoid_of(alpha * g);
  return times(g, (number){s.value, alpha * s.slope});
}

static number gelu_of(double x) {
  const double density = exp(-x * x / 2) / sqrt(2 * acos(-1));
  return times(x, (number){erfc(-x / sqrt(2)) / 2, density});
}

static number gelu_tanh_of(double x) {
  const double scale = sqrt(8 / acos(-1)), near = clamped(x, -1e6, 1e6);
  const number s = sigmoid_of(scale * (near + 0.044715 * near * near * near));
  return times(x, (number){s.value, s.slope * scale * (1 + 3 * 0.044715 * near * near)});
}

static number capped_of(double cap, double x) {
  if (isinf(cap)) return (number){x, 1};
  const double t = tanh(x / cap), c = cosh(clamped(x / cap, -300, 300));
  return (number){cap * t, 1 / (c * c)};
}

static number relu_of(double x) { return (number){x > 0 ? x : 0, x > 0}; }

/* What the gate makes and what the up projection makes, of which h is the product. */
static void factors(const kt_activation *a, double gate, double up, number *of_gate,
                    number *of_up) {
  const double limit = (double)a->limit, alpha = (double)a->alpha, beta = (double)a->beta;
  const double g = fmin(gate, limit), u = clamped(up, -limit, limit);
  *of_gate = (number){1, 0};
  *of_up = (number){u, 1};
  switch (a->function) {
  case KT_SWIGLU: *of_gate = swish_of(alpha, g), of_up->value = u + beta; break;
  case KT_GELU: *of_gate = gelu_of(g); break;
  case KT_GELU_TANH: *of_gate = gelu_tanh_of(g); break;
  case KT_SWIGLU_CLAMPED: *of_gate = swish_of(1, gate); break;
  case KT_SOFTCAP: {
    const number s = sigmoid_of(g), cap = capped_of(alpha, g);
    *of_gate = (number){cap.value * s.value, cap.slope * s.value + cap.value * s.slope};
    *of_up = capped_of(beta, u);
    break;
  }
  case KT_RELU: *of_up = relu_of(u); break;
  case KT_RELU2:
    *of_up = (number){relu_of(u).value * relu_of(u).value, 2 * relu_of(u).value};
    break;
  case KT_UNGATED_GELU: *of_up = gelu_of(u); break;
  default: *of_up = gelu_tanh_of(u);
  }
  if (a->function == KT_SWIGLU_CLAMPED && of_gate->value > limit) *of_gate = (number){limit, 0};
  if (a->function != KT_SWIGLU_CLAMPED && gate > limit) of_gate->slope = 0;
  if (fabs(up) > limit) of_up->slope = 0;
}

/* One call's arrays; STRIDE and the like are not what a caller without padding has. */
enum { TOKENS = 700, STRIDE = 40, SAVED = 48, SCALES = 3 };

typedef struct inner {
  kt_inner_back in;
  float *base, *lora, *weight, *scale, *dot;
  int8_t *codes;
  uint16_t *gate, *up, *d_gate, *d_up, *middle;
} inner;

static inner new_inner(int64_t tokens, int with_lora, int with_codes) {
  inner n = {.base = held((size_t)tokens * 128),
             .lora = with_lora ? held((size_t)tokens * 128) : NULL,
             .weight = held((size_t)tokens * 4),
             .scale = held((size_t)((tokens - 1) * SCALES + 1) * 4),
             .codes = with_codes ? held((size_t)((tokens - 1) * SAVED + 32)) : NULL,
             .dot = held((size_t)tokens * 4),
             .gate = held((size_t)((tokens - 1) * SAVED + 32) * 2),
             .up = held((size_t)((tokens - 1) * SAVED + 32) * 2),
             .d_gate = held((size_t)((tokens - 1) * STRIDE + 32) * 2),
             .d_up = held((size_t)((tokens - 1) * STRIDE + 32) * 2),
             .middle = held((size_t)((tokens - 1) * STRIDE + 32) * 2)};
  n.in = (kt_inner_back){.base = n.base,
                         .lora = n.lora,
                         .gate = n.gate,
                         .up = n.up,
                         .weight = n.weight,
                         .codes = n.codes,
                         .code_scale = n.scale,
                         .tokens = tokens,
                         .saved_stride = SAVED,
                         .code_stride = SAVED,
                         .code_scale_stride = SCALES,
                         .stride = STRIDE,
                         .d_gate = n.d_gate,
                         .d_up = n.d_up,
                         .middle = n.middle,
                         .dot = n.dot};
  return n;
}

/* Small and large numbers of both signs, with those where something changes. */
static float argument(int64_t i) {
  static const float marks[] = {
      0.0f, -0.0f, 0.25f, -0.25f, 0.5f,  -0.5f,  1.0f,  -1.0f,  2.0f,   -2.0f,   3.0f,   -3.0f,
      7.0f, -7.0f, 13.0f, 87.0f,  88.0f, 88.5f,  89.0f, -87.0f, -88.0f, -88.5f,  -89.0f, -104.0f,
      1e4f, -1e4f, 1e10f, -1e10f, 1e20f, -1e20f, 1e30f, -1e30f, 1e-30f, -1e-30f, 1e-40f, -1e-40f};
  enum { MARKS = sizeof marks / sizeof *marks };
  if (i < MARKS) return marks[i];
  const float x = unit();
  return i % 3 == 0 ? x : i % 3 == 1 ? 8 * x : 120 * x;
}

/* bf16 rounds by 1/256 at most; `size` is what absolute errors of binary32 are to be seen with. */
static int is_near(double found, double expected, double size) {
  const double most = 3.3895e38;
  if (fabs(expected) > most) return isinf(found) && (found > 0) == (expected > 0);
  return fabs(found - expected) <= fabs(expected) / 255 + 1e-6 * size + 1e-38;
}

static void near(const char *what, const kt_activation *a, float gate, float up, float found,
                 double expected, double size) {
  if (is_near((double)found, expected, size)) return;
  if (failures++ < 40)
    printf("FAILED: %s of function %d, limit %g, gate %g, up %g: %g, not %g\n", what,
           (int)a->function, (double)a->limit, (double)gate, (double)up, (double)found, expected);
}

/* Arguments, and what they are multiplied with: `most` is the largest of gates and ups. */
static void draw_inner(const inner *n, float most) {
  for (int64_t t = 0; t < n->in.tokens; t++) {
    n->weight[t] = unit();
    n->scale[t * SCALES] = t % 9 ? ldexpf(1.0f + unit(), -(int)(t % 12)) : 0;
    for (int64_t r = 0; r < 32; r++) {
      const float gate = argument(t < 64 ? r : t + r), up = argument(t < 36 ? t : t * 7 + r);
      n->base[t * 32 + r] = unit();
      if (n->lora) n->lora[t * 32 + r] = unit();
      if (n->codes) n->codes[t * SAVED + r] = (int8_t)(draw() % 255 - 127);
      n->gate[t * SAVED + r] = bf16(fabsf(gate) <= most ? gate : unit() * most);
      n->up[t * SAVED + r] = bf16(fabsf(up) <= most ? up : unit() * most);
    }
  }
}

static void check_derivatives(const kt_activation *a, int with_lora) {
  inner n = new_inner(TOKENS, with_lora, 0);
  draw_inner(&n, 1e30f);
  kt_gradients_scalar.activate[a->function](a, &n.in);
  for (int64_t t = 0; t < TOKENS; t++)
    for (int64_t r = 0; r < 32; r++) {
      const float g = wide(n.gate[t * SAVED + r]), u = wide(n.up[t * SAVED + r]);
      const float base = n.base[t * 32 + r], lora = with_lora ? n.lora[t * 32 + r] : 0;
      const double d = (double)n.weight[t] * (double)(base + lora), size = fabs(d);
      number of_gate, of_up;
      factors(a, (double)g, (double)u, &of_gate, &of_up);
      const double gate_size = fmax(1, fabs(of_gate.value)), up_size = fabs(of_up.value);
      const uint16_t *d_gate = n.d_gate + t * STRIDE, *d_up = n.d_up + t * STRIDE;
      if (kt_has_gate(a->function))
        near("d_gate", a, g, u, wide(d_gate[r]), d * of_gate.slope * of_up.value, size * up_size);
      near("d_up", a, g, u, wide(d_up[r]), d * of_gate.value * of_up.slope, size * gate_size);
      near("middle", a, g, u, wide(n.middle[t * STRIDE + r]), of_gate.value * of_up.value,
           gate_size * fmax(1, up_size));
    }
  release_all();
}

static void check_dots(const kt_activation *a, int with_codes) {
  inner n = new_inner(TOKENS, 1, with_codes);
  draw_inner(&n, 9.0f);
  kt_gradients_scalar.activate[a->function](a, &n.in);
  for (int64_t t = 0; t < TOKENS; t++) {
    double sum = 0, doubt = 0;
    for (int64_t r = 0; r < 32; r++) {
      const double base = (double)n.base[t * 32 + r];
      const double code = with_codes ? (double)n.codes[t * SAVED + r] : 0;
      const double middle = (double)wide(n.middle[t * STRIDE + r]);
      const double read = with_codes ? code * (double)n.scale[t * SCALES] : middle;
      sum += base * read;
      doubt += 1e-5 * fabs(read * base);
    }
    if (!(fabs(sum - (double)n.dot[t]) <= doubt + 1e-7)) failed("dot", a->function, t, n.dot[t]);
  }
  release_all();
}

/* Anything at all in one of a few places. */
static void spoil(const inner *n, float value) {
  const int64_t t = (int64_t)(draw() % (uint64_t)n->in.tokens), r = (int64_t)(draw() % 32);
  switch (draw() % 6) {
  case 0: n->base[t * 32 + r] = value; break;
  case 1: n->weight[t] = value; break;
  case 2: n->gate[t * SAVED + r] = bf16(value); break;
  case 3: n->up[t * SAVED + r] = bf16(value); break;
  case 4: n->scale[t * SCALES] = value; break;
  default: n->lora ? (n->lora[t * 32 + r] = value) : 0;
  }
}

static void clear_results(const inner *n) {
  const size_t size = (size_t)((n->in.tokens - 1) * STRIDE + 32) * 2;
  memset(n->d_gate, 0xa5, size);
  memset(n->d_up, 0xa5, size);
  memset(n->middle, 0xa5, size);
  memset(n->dot, 0xa5, (size_t)n->in.tokens * 4);
}

static void compare_activation(const kt_gradients *level, const kt_activation *a, int64_t tokens,
                               int parts) {
  const inner n = new_inner(tokens, parts & 1, parts & 2);
  inner other = new_inner(tokens, 0, 0);
  const size_t size = (size_t)((tokens - 1) * STRIDE + 32) * 2;
  other.in.base = n.base, other.in.lora = n.lora, other.in.weight = n.weight;
  other.in.gate = n.gate, other.in.up = n.up, other.in.codes = n.codes;
  other.in.code_scale = n.scale;
  if (parts & 4) other.in.middle = NULL;
  draw_inner(&n, 1e38f);
  static const uint32_t odd[] = {0x7fc12345, 0xff812345, 0x7f800000, 0xff800000, 1,
                                 0x807fffff, 0x7f7fffff, 0xff7fffff, 0x00800000, 0x80000000};
  for (int64_t i = 0; i < tokens / 2; i++)
    spoil(&n, of_bits(i % 3 ? odd[i % 10] : (uint32_t)draw()));
  clear_results(&n);
  clear_results(&other);
  kt_gradients_scalar.activate[a->function](a, &n.in);
  level->activate[a->function](a, &other.in);
  if (parts & 4) memset(n.middle, 0xa5, size);
  const int same = !memcmp(n.d_gate, other.d_gate, size) && !memcmp(n.d_up, other.d_up, size) &&
                   !memcmp(n.middle, other.middle, size) &&
                   !memcmp(n.dot, other.dot, (size_t)tokens * 4);
  if (!same) failed("activate", a->function, tokens, (float)parts);
  release_all();
}

/* ---- Sums of outer products -------------------------------------------------- */

typedef struct product {
  kt_outer o;
  float *expected;
  size_t floats;
} product;

enum { PADDING = 3 };

/* One fma after the other, in an order of its own. */
static void compute_product(const kt_outer *o, float *expected) {
  for (int64_t j = 0; j < o->rank; j++)
    for (int64_t c = 0; c < o->cols; c++)
      for (int64_t i = 0; i < o->count; i++) {
        uint16_t b;
        memcpy(&b, o->b + (o->index ? o->index[i] : i) * o->b_stride + 2 * c, sizeof b);
        float *sum = expected + j * o->row + c * o->col;
        *sum = fmaf(o->a[i * o->a_stride + j], wide(b), *sum);
      }
}

static product new_product(int64_t count, int64_t rank, int64_t cols, int by_columns, int indexed) {
  const int64_t rows = count + 4, lines = by_columns ? cols : rank, line = by_columns ? rank : cols;
  const int64_t stride = line + PADDING, b_stride = (cols * 2 + 63) / 64 * 64 + 64;
  product p = {.floats = (size_t)((lines - 1) * stride + line)};
  float *a = held((size_t)(count * (rank + 1)) * 4), *out = held(p.floats * 4);
  uint8_t *b = held((size_t)(rows * b_stride));
  int32_t *index = indexed ? held((size_t)count * 4) : NULL;
  p.expected = held(p.floats * 4);
  for (int64_t i = 0; i < count * (rank + 1); i++) a[i] = unit();
  for (int64_t i = 0; i < rows * b_stride / 2; i++) ((uint16_t *)(void *)b)[i] = bf16(unit());
  for (int64_t i = 0; indexed && i < count; i++) index[i] = (int32_t)(draw() % (uint64_t)rows);
  for (size_t i = 0; i < p.floats; i++) out[i] = p.expected[i] = unit();
  p.o = (kt_outer){a, b, index, count, rank, cols, rank + 1, b_stride, out, 1, 1, 0, NULL};
  *(by_columns ? &p.o.col : &p.o.row) = stride;
  compute_product(&p.o, p.expected);
  return p;
}

static void check_outer(const kt_gradients *level, int64_t count, int64_t rank, int64_t cols,
                        int ways) {
  const product p = new_product(count, rank, cols, ways & 1, ways & 2);
  level->outer(&p.o);
  if (memcmp(p.o.out, p.expected, p.floats * 4)) failed("outer", (int)rank, count, (float)ways);
  release_all();
}

/* A NaN and an Inf reach their row and column, and nothing else. */
static void check_odd_outer(const kt_gradients *level, int ways) {
  const product p = new_product(5, 20, 64, ways & 1, 0);
  ((float *)(uintptr_t)p.o.a)[2 * p.o.a_stride + 9] = NAN;
  ((uint16_t *)(uintptr_t)(p.o.b + 3 * p.o.b_stride))[40] = 0x7f80;
  level->outer(&p.o);
  for (int64_t j = 0; j < 20; j++)
    for (int64_t c = 0; c < 64; c++) {
      const float found = p.o.out[j * p.o.row + c * p.o.col];
      if (j == 9 ? !isnan(found) : c == 40 ? !isinf(found) : !isfinite(found))
        failed("outer with NaN", (int)j, c, found);
    }
  release_all();
}

static void check_outers(const kt_gradients *level) {
  static const int64_t counts[] = {0, 1, 5, 33}, ranks[] = {1, 2, 3, 7, 8, 13, 16, 20, 31, 64};
  for (int ways = 0; ways < 4; ways++) {
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
      for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        check_outer(level, counts[c], ranks[r], 32 + 64 * (int64_t)(r % 2), ways);
    check_outer(level, 3, 1024, 32, ways);
    check_odd_outer(level, ways);
  }
}

/* ---- The same by AMX ------------------------------------------------------------ */

static uint8_t *scratch(void) { return held(KT_OUTER_SCRATCH); }

/* Whether a sum belongs there, and not to the padding of lines. */
static int is_named(const kt_outer *o, int64_t at) {
  const int64_t line = o->col == 1 ? o->row : o->col;
  return at % line < (o->col == 1 ? o->cols : o->rank);
}

/* Factors lose 2^-16 of themselves, sums are rounded once in each of 32 slots. */
static void check_fast_outer(int64_t count, int64_t rank, int64_t cols, int ways) {
  product p = new_product(count, rank, cols, ways & 1, ways & 2);
  p.o.fresh = ways >> 2 & 1, p.o.scratch = scratch();
  for (int64_t j = 0; j < rank; j++)
    for (int64_t c = 0; c < cols; c++) {
      const int64_t at = j * p.o.row + c * p.o.col;
      double expected = p.o.fresh ? 0.0 : (double)p.o.out[at];
      for (int64_t i = 0; i < count; i++) {
        uint16_t b;
        memcpy(&b, p.o.b + (p.o.index ? p.o.index[i] : i) * p.o.b_stride + 2 * c, sizeof b);
        expected += (double)p.o.a[i * p.o.a_stride + j] * (double)wide(b);
      }
      p.expected[at] = (float)expected;
    }
  float *const before = held(p.floats * 4);
  memcpy(before, p.o.out, p.floats * 4);
  kt_outer_best()(&p.o);
  for (size_t i = 0; i < p.floats; i++) {
    const int named = is_named(&p.o, (int64_t)i);
    const double bound = 3e-5 * sqrt((double)count + 1);
    if (named ? !(fabs((double)p.o.out[i] - (double)p.expected[i]) <= bound)
              : memcmp(before + i, p.o.out + i, 4) != 0) {
      failed("fast outer", (int)rank, count, (float)ways);
      break;
    }
  }
  release_all();
}

/* A NaN and an Inf reach their row and column as numbers that are not finite, and nothing else. */
static void check_odd_fast_outer(int ways) {
  product p = new_product(20, 20, 64, ways & 1, 0);
  p.o.scratch = scratch();
  ((float *)(uintptr_t)p.o.a)[2 * p.o.a_stride + 9] = NAN;
  ((float *)(uintptr_t)p.o.a)[3 * p.o.a_stride + 11] = INFINITY;
  ((uint16_t *)(uintptr_t)(p.o.b + 3 * p.o.b_stride))[40] = 0x7f80;
  kt_outer_best()(&p.o);
  for (int64_t j = 0; j < 20; j++)
    for (int64_t c = 0; c < 64; c++) {
      const float found = p.o.out[j * p.o.row + c * p.o.col];
      if (j == 9 ? !isnan(found) : !isfinite(found) != (j == 11 || c == 40))
        failed("fast outer with NaN", (int)j, c, found);
    }
  release_all();
}

static void check_fast_outers(void) {
  static const int64_t counts[] = {1, 8, 33, 100, 192}, ranks[] = {1, 5, 16, 17, 33, 64};
  for (int ways = 0; ways < 8; ways++) {
    for (size_t r = 0; r < sizeof ranks / sizeof *ranks; r++)
      for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        check_fast_outer(counts[c], ranks[r], 32 + 64 * (int64_t)(r % 2), ways);
    check_fast_outer(40, 150, 32, ways);
    check_odd_fast_outer(ways & 1);
  }
}

/* ---- Dropout ------------------------------------------------------------------- */

enum { ROWS = 512, COLUMNS = 512, BITS = ROWS * COLUMNS };

/* 1 where an element is dropped: COLUMNS of `pair` to pair + ROWS - 1. */
static void draw_mask(const kt_gradients *level, const kt_drop *drop, int64_t pair, int64_t column,
                      uint8_t *mask) {
  uint16_t *row = held(COLUMNS * sizeof *row);
  for (int64_t i = 0; i < ROWS; i++) {
    memset(row, 0xff, COLUMNS * sizeof *row); /* NaN */
    level->drop_bf16(drop, pair + i, column, COLUMNS, row);
    for (int64_t c = 0; c < COLUMNS; c++) {
      if (row[c] != 0 && row[c] != 0xffff) failed("dropped", (int)i, c, wide(row[c]));
      mask[i * COLUMNS + c] = row[c] == 0;
    }
  }
}

static void bounded(const char *what, double rate, double deviations) {
  if (!(fabs(deviations) < 5)) failed(what, 0, 0, (float)deviations), printf("rate %g\n", rate);
}

/* Counts of the lines of a mask, `step` elements apart: whether they spread as random ones do. */
static void check_lines(const char *what, const uint8_t *mask, double p, int64_t line,
                        int64_t step) {
  double chi = 0;
  for (int64_t i = 0; i < ROWS; i++) {
    double count = 0;
    for (int64_t k = 0; k < ROWS; k++) count += mask[i * line + k * step];
    chi += pow(count - p * ROWS, 2) / (ROWS * p * (1 - p));
  }
  bounded(what, p, (chi - ROWS) / sqrt(2.0 * ROWS));
}

/* Agreement of two masks beyond what chance makes; b may be a, shifted. */
static void check_pair(const char *what, const uint8_t *a, const uint8_t *b, int64_t count,
                       double p) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += (a[i] - p) * (b[i] - p);
  bounded(what, p, sum / (p * (1 - p) * sqrt((double)count)));
}

static void check_randomness(const kt_gradients *level, double p) {
  static uint8_t mask[BITS], other[BITS];
  static const int64_t shifts[] = {1,           2,       3,           16,          32,          256,
                                   COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS, 64 * COLUMNS};
  const kt_drop drop = {1, (uint32_t)(p * 4294967296.0), 0};
  const kt_drop others[] = {{1, drop.below, 1},
                            {0, drop.below, 0},
                            {2, drop.below, 0},
                            {1 + (1ull << 32), drop.below, 0},
                            {1 + (1ull << 63), drop.below, 0}};
  double sum = 0;
  draw_mask(level, &drop, 0, 0, mask);
  for (int64_t i = 0; i < BITS; i++) sum += mask[i];
  bounded("rate", p, (sum - p * BITS) / sqrt(BITS * p * (1 - p)));
  check_lines("rates of rows", mask, p, COLUMNS, 1);
  check_lines("rates of columns", mask, p, 1, COLUMNS);
  for (size_t i = 0; i < sizeof shifts / sizeof *shifts; i++)
    check_pair("shifted", mask, mask + shifts[i], BITS - shifts[i], p);
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    draw_mask(level, others + i, 0, 0, other);
    check_pair("another stream", mask, other, BITS, p);
  }
  draw_mask(level, &drop, 1ll << 40, 0, other);
  check_pair("far pairs", mask, other, BITS, p);
  draw_mask(level, &drop, 0, 1 << 20, other);
  check_pair("far columns", mask, other, BITS, p);
  release_all();
}

/* Any part of a row, in either dtype, is dropped as the reference drops the whole. */
static void check_drop(const kt_gradients *level, uint32_t below, int64_t pair) {
  enum { N = 224 };
  static const int64_t firsts[] = {0, 32, 160};
  const kt_drop drop = {draw(), below, (int32_t)(pair & 1)};
  uint16_t whole[N];
  memset(whole, 0xff, sizeof whole);
  kt_gradients_scalar.drop_bf16(&drop, pair, 0, N, whole);
  for (size_t i = 0; i < sizeof firsts / sizeof *firsts; i++) {
    const int64_t first = firsts[i], n = first + 96 > N ? N - first : 96;
    uint16_t *half = held((size_t)n * 2);
    float *full = held((size_t)n * 4);
    for (int64_t k = 0; k < n; k++) half[k] = 0xffff, full[k] = -1;
    level->drop_bf16(&drop, pair, first, n, half);
    level->drop_f32(&drop, pair, first, n, full);
    for (int64_t k = 0; k < n; k++)
      if (half[k] != whole[first + k] || bits_of(full[k]) != (half[k] ? 0xbf800000u : 0u) ||
          (below == 0 && !half[k]))
        failed("drop", (int)first, k, full[k]);
  }
  release_all();
}

/* Any float: denormals, NaN, Inf, bits that round to even either way, large ones. */
static float odd_float(void) {
  const uint32_t bits = (uint32_t)draw();
  switch (draw() % 6) {
  case 0: return of_bits(bits & 0x807fffff);
  case 1: return of_bits((bits & 0x80000000) | 0x7f800000 | (draw() & 1 ? bits & 0x7fffff : 0));
  case 2: return of_bits((bits & 0x8000ffff) | 0x3f800000 | (bits & 7) << 16);
  case 3: return of_bits((bits & 0x80007fff) | 0x40e00000);
  case 4: return of_bits((bits & 0x80ffffff) | 0x7f000000);
  default: return of_bits(bits);
  }
}

/* Whether `kept` is bf16(value), or the next number on value's own side of the cut. */
static int is_kept(float value, float cut, uint16_t kept) {
  const float found = fabsf(wide(kept));
  if (isnan(value)) return isnan(found);
  const uint16_t even = nearest_bf16(value);
  const int crosses = (fabsf(wide(even)) > cut) != (fabsf(value) > cut);
  return (found > cut) == (fabsf(value) > cut) && abs(kept - even) == crosses;
}

static void check_keep(const kt_gradients *level) {
  enum { KEPT = 40, ROW = 48 };
  static const float cuts[] = {INFINITY, 7.0f, 1.0f, 0.0f, 7.015625f, 1e-40f, 3e38f};
  const size_t size = ((KEPT - 1) * ROW + 32) * sizeof(uint16_t);
  for (int n = 0; n < 700; n++) {
    float *products = held(KEPT * 32 * sizeof *products), *bias = held(32 * sizeof *bias);
    uint16_t *expected = held(size), *found = held(size);
    for (int i = 0; i < KEPT * 32; i++) products[i] = odd_float();
    for (int i = 0; i < 32; i++) bias[i] = draw() & 1 ? odd_float() : 0;
    memset(expected, 0xa5, size);
    memset(found, 0xa5, size);
    const int64_t first = (int64_t)(draw() % KEPT);
    const int64_t end = first + (int64_t)(draw() % (uint64_t)(KEPT + 1 - first));
    const float *const added = draw() & 1 ? bias : NULL, cut = cuts[n % 7];
    kt_keep k = {products, added, KEPT, cut, expected, ROW};
    kt_gradients_scalar.keep(&k, first, end);
    k.rows = found;
    level->keep(&k, first, end);
    if (memcmp(expected, found, size)) failed("keep", n, first, cut);
    for (int64_t i = first * 32; i < end * 32; i++) {
      const float value = added ? products[i] + added[i % 32] : products[i];
      const uint16_t kept = expected[i / 32 * ROW + i % 32];
      if (!is_kept(value, cut, kept)) failed("keep's number", n, i, value);
    }
    release_all();
  }
}

static void check_level(const kt_gradients *level) {
  check_keep(level);
  static const int64_t tokens[] = {1, 2, 70};
  for (int i = 0; i < ACTIVATIONS; i++)
    for (int parts = 0; parts < 8; parts++)
      for (int t = 0; t < 3; t++) compare_activation(level, activations + i, tokens[t], parts);
  check_outers(level);
  for (int64_t pair = 0; pair < 20; pair++) check_drop(level, (uint32_t)draw(), pair << pair);
  check_drop(level, 0, 3);
  check_drop(level, UINT32_MAX, 3);
}

int main(void) {
  assume_amx();
  for (int i = 0; i < ACTIVATIONS; i++)
    for (int part = 0; part < 2; part++) {
      check_derivatives(activations + i, part);
      check_dots(activations + i, part);
    }
  check_randomness(&kt_gradients_scalar, 0.5);
  check_randomness(&kt_gradients_scalar, 0.05);
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    kt_isa_use(kt_isa_at(i));
    check_level(KT_CELL(kt_gradients_of));
    check_fast_outers();
  }
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
