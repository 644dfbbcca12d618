/* gradients_check.c - what a backward pass does besides matrix products, without Python.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/gradients_check.c -lm -pthread && ./a.out
 *
 * Derivatives of scalar are compared with formulas in binary64, other levels with scalar, bit by
 * bit. Arrays end at unreadable pages. Exit code: 0 all passed, 1 something differed, 2 no
 * memory. */
#define _GNU_SOURCE
#include "../src/train/gradients.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int failures;

static uint64_t state = 1;

static uint64_t draw(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static float unit(void) { return (float)(draw() >> 40) / 16777216.0f * 2.0f - 1.0f; }

/* `size` bytes that end at an unreadable page; never freed, except by the end of the program. */
static void *guarded(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (size + page - 1) / page * page;
  uint8_t *memory =
      mmap(NULL, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory + inner, page, PROT_NONE) != 0) exit(2);
  return memory + inner - size;
}

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float wide(uint16_t half) { return of_bits((uint32_t)half << 16); }
static uint16_t cut(float value) { return (uint16_t)(bits_of(value) >> 16); }

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
  float *base, *lora, *weight, *h_scale, *dot;
  uint16_t *gate, *up, *d_gate, *d_up, *middle;
} inner;

static inner new_inner(int64_t tokens, int with_lora, int with_scale) {
  inner n = {.base = guarded((size_t)tokens * 128),
             .lora = with_lora ? guarded((size_t)tokens * 128) : NULL,
             .weight = guarded((size_t)tokens * 4),
             .h_scale = with_scale ? guarded((size_t)((tokens - 1) * SCALES + 1) * 4) : NULL,
             .dot = guarded((size_t)tokens * 4),
             .gate = guarded((size_t)((tokens - 1) * SAVED + 32) * 2),
             .up = guarded((size_t)((tokens - 1) * SAVED + 32) * 2),
             .d_gate = guarded((size_t)((tokens - 1) * STRIDE + 32) * 2),
             .d_up = guarded((size_t)((tokens - 1) * STRIDE + 32) * 2),
             .middle = guarded((size_t)((tokens - 1) * STRIDE + 32) * 2)};
  n.in = (kt_inner_back){.base = n.base,
                         .lora = n.lora,
                         .gate = n.gate,
                         .up = n.up,
                         .weight = n.weight,
                         .h_scale = n.h_scale,
                         .tokens = tokens,
                         .saved_stride = SAVED,
                         .h_scale_stride = SCALES,
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

/* Columns are gates, tokens ups; weight 1, base 1. */
static void check_derivatives(const kt_activation *a) {
  inner n = new_inner(TOKENS, 0, 0);
  for (int64_t t = 0; t < TOKENS; t++) {
    n.weight[t] = 1;
    for (int64_t r = 0; r < 32; r++) {
      n.base[t * 32 + r] = 1;
      n.gate[t * SAVED + r] = cut(argument(t < 64 ? r : t + r));
      n.up[t * SAVED + r] = cut(argument(t < 36 ? t : t * 7 + r));
    }
  }
  kt_gradients_scalar.activate[a->function](a, &n.in);
  for (int64_t t = 0; t < TOKENS; t++)
    for (int64_t r = 0; r < 32; r++) {
      const float g = wide(n.gate[t * SAVED + r]), u = wide(n.up[t * SAVED + r]);
      number of_gate, of_up;
      factors(a, (double)g, (double)u, &of_gate, &of_up);
      const double gate_size = fmax(1, fabs(of_gate.value));
      const uint16_t *d_gate = n.d_gate + t * STRIDE, *d_up = n.d_up + t * STRIDE;
      if (kt_has_gate(a->function))
        near("d_gate", a, g, u, wide(d_gate[r]), of_gate.slope * of_up.value, fabs(of_up.value));
      near("d_up", a, g, u, wide(d_up[r]), of_gate.value * of_up.slope, gate_size);
      near("middle", a, g, u, wide(n.middle[t * STRIDE + r]), of_gate.value * of_up.value,
           gate_size * fmax(1, fabs(of_up.value)));
    }
}

int main(void) {
  for (int i = 0; i < ACTIVATIONS; i++) check_derivatives(activations + i);
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
