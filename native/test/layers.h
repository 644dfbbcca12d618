/* layers.h - layers of random weights for the programs that check whole layers, and what they
 * compute, in plain loops that share nothing with the library. */
#ifndef KT_TEST_LAYERS_H
#define KT_TEST_LAYERS_H

#include "basics.h"

typedef struct kind {
  const char *name;
  kt_layout layout;
  int exact; /* the same bits on every level */
} kind;

enum { INT8, INT4, BF16, FP8, FP8_ROWS, MXFP4, GINT4_32, GINT4_128, GINT8_64, NVFP4, MXFP8, KINDS };

static const kind kinds[KINDS] = {
    [INT8] = {"int8", {KT_FORMAT_INT8, 0, KT_SCALE_F32}, 1},
    [INT4] = {"int4", {KT_FORMAT_INT4, 0, KT_SCALE_F32}, 1},
    [BF16] = {"bf16", {KT_FORMAT_BF16, 0, KT_SCALE_NONE}, 0},
    [FP8] = {"fp8", {KT_FORMAT_FP8, 128, KT_SCALE_F32}, 0},
    [FP8_ROWS] = {"fp8 per row", {KT_FORMAT_FP8, 0, KT_SCALE_F32}, 0},
    [MXFP4] = {"mxfp4", {KT_FORMAT_MXFP4, 32, KT_SCALE_UE8M0}, 0},
    [GINT4_32] = {"gint4 32", {KT_FORMAT_GINT4, 32, KT_SCALE_BF16}, 1},
    [GINT4_128] = {"gint4 128", {KT_FORMAT_GINT4, 128, KT_SCALE_F32}, 1},
    [GINT8_64] = {"gint8 64", {KT_FORMAT_GINT8, 64, KT_SCALE_BF16}, 1},
    [NVFP4] = {"nvfp4", {KT_FORMAT_NVFP4, 0, KT_SCALE_F32}, 0},
    [MXFP8] = {"mxfp8", {KT_FORMAT_MXFP8, 32, KT_SCALE_UE8M0}, 0},
};

#define SILU {KT_SWIGLU, 1.0f, 0.0f, INFINITY}

/* One with a number for everything that its formula has. */
static const kt_activation silu = SILU, others[] = {
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

/* ---- Weights and what they stand for -------------------------------------- */

/* Whether activations are rounded to integers. */
static inline int is_integer(const kt_layout *layout) {
  return layout->format == KT_FORMAT_INT8 || layout->format == KT_FORMAT_INT4 ||
         layout->format == KT_FORMAT_GINT4 || layout->format == KT_FORMAT_GINT8;
}

/* A code as the layout's checkpoints store it; for nibbles, two of them. */
static inline void draw_codes(const kt_layout *layout, uint8_t *codes, int64_t elements) {
  for (int64_t i = 0; i < elements; i++) {
    const uint8_t byte = (uint8_t)draw();
    switch (layout->format) {
    case KT_FORMAT_INT8: codes[i] = byte == 0x80 ? 0 : byte; break;
    case KT_FORMAT_INT4: codes[i] = (uint8_t)(byte % 15 - 7); break;
    case KT_FORMAT_BF16: ((uint16_t *)(void *)codes)[i] = bf16(unit() / 16); break;
    case KT_FORMAT_GINT8: codes[i] = byte; break;
    case KT_FORMAT_FP8:
    case KT_FORMAT_MXFP8: codes[i] = (byte & 0x7f) > 0x50 ? byte & 0xbf : byte; break;
    case KT_FORMAT_NVFP4: /* scales from 2^-3 to 15 * 2^-3 */
      codes[i / 32 * 18 + i % 32 / 2] = byte;
      codes[i / 32 * 18 + 16 + i % 32 / 16] = (uint8_t)(0x20 + byte % 32);
      break;
    default: codes[i / 2] = byte;
    }
  }
}

static inline void draw_scales(const kt_layout *layout, void *scale, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const float value = 0.004f * (1.5f + unit());
    if (layout->scale_dtype == KT_SCALE_F32) ((float *)scale)[i] = value;
    if (layout->scale_dtype == KT_SCALE_BF16) ((uint16_t *)scale)[i] = bf16(value);
    if (layout->scale_dtype == KT_SCALE_UE8M0) ((uint8_t *)scale)[i] = (uint8_t)(116 + draw() % 4);
  }
}

static inline float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = (code & 0x7f) == 0x7f ? NAN
                     : exponent            ? ldexpf((float)(8 + mantissa), exponent - 10)
                                           : ldexpf((float)mantissa, -9);
  return code & 0x80 ? -size : size;
}

static inline float e2m1(int code) {
  static const float sizes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -sizes[code & 7] : sizes[code];
}

/* Element i of row-major codes, without its scale. */
static inline float code_value(const kt_layout *layout, const uint8_t *codes, int64_t i) {
  const int nibble = codes[i / 2] >> (i % 2 * 4) & 15;
  switch (layout->format) {
  case KT_FORMAT_INT8:
  case KT_FORMAT_INT4: return (float)((const int8_t *)codes)[i];
  case KT_FORMAT_BF16: return wide(((const uint16_t *)(const void *)codes)[i]);
  case KT_FORMAT_GINT8: return (float)(codes[i] - 128);
  case KT_FORMAT_FP8:
  case KT_FORMAT_MXFP8: return e4m3(codes[i]);
  case KT_FORMAT_MXFP4: return e2m1(nibble);
  case KT_FORMAT_NVFP4: {
    const uint8_t *const block = codes + i / 32 * 18;
    const int code = block[i % 32 / 2] >> (i % 2 * 4) & 15;
    return e2m1(code) * e4m3(block[16 + i % 32 / 16]);
  }
  default: return (float)(nibble - 8);
  }
}

/* What a code of row n, column k of [rows, cols] is worth: 16 scales of INT4. */
static inline float scale_value(const kt_layout *layout, const void *scale, int64_t cols, int64_t n,
                                int64_t k) {
  const int64_t row = layout->format == KT_FORMAT_FP8 && layout->group ? n / layout->group : n;
  const int64_t at = layout->group ? row * (cols / layout->group) + k / layout->group : row;
  switch (layout->scale_dtype) {
  case KT_SCALE_F32:
    return (layout->format == KT_FORMAT_INT4 ? 16.0f : 1.0f) * ((const float *)scale)[at];
  case KT_SCALE_BF16: return wide(((const uint16_t *)scale)[at]);
  case KT_SCALE_UE8M0: return ldexpf(1.0f, ((const uint8_t *)scale)[at] - 127);
  default: return 1.0f;
  }
}

/* Packs a random matrix; returns its values [rows, cols]. */
static inline float *make_matrix(const kt_layout *layout, int64_t rows, int64_t cols,
                                 const void **codes, const void **scale) {
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

static inline float *make_bias(int64_t rows) {
  float *bias = guarded((size_t)rows * sizeof *bias);
  for (int64_t i = 0; i < rows; i++) bias[i] = unit();
  return bias;
}

/* Values of the matrices of an expert of one part; no gate: NULL. */
typedef struct expert_values {
  float *gate, *up, *down;
  const kt_expert *biases;
} expert_values;

static inline expert_values make_expert(const kt_moe *moe, int biased, int64_t part, kt_expert *e) {
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

static inline void free_values(expert_values v) {
  free(v.gate);
  free(v.up);
  free(v.down);
}

/* ---- Gradients ------------------------------------------------------------------ */

/* In the order of kt_moe_gradients. */
enum { DX, DWEIGHTS, GATE_A, GATE_B, UP_A, UP_B, DOWN_A, DOWN_B, GATE, UP, DOWN, GRADIENTS };

/* `g` with pointers to all of them. */
static inline kt_moe_gradients with_gradients(kt_moe_gradients g, void *const gradient[GRADIENTS]) {
  g.dx = gradient[DX], g.dweights = gradient[DWEIGHTS];
  g.gate_a = gradient[GATE_A], g.gate_b = gradient[GATE_B];
  g.up_a = gradient[UP_A], g.up_b = gradient[UP_B];
  g.down_a = gradient[DOWN_A], g.down_b = gradient[DOWN_B];
  g.gate = gradient[GATE], g.up = gradient[UP], g.down = gradient[DOWN];
  return g;
}

/* ---- Arithmetic ----------------------------------------------------------------- */

/* Activations as the format rounds them: bf16, or int8 with a scale per row or group. */
static inline void round_row(const kt_layout *layout, float *x, int64_t n) {
  const int integer = is_integer(layout);
  const int64_t run = layout->group && integer ? layout->group : n;
  for (int64_t first = 0; first < n; first += run) {
    float most = 0;
    for (int64_t i = first; i < first + run; i++) most = fmaxf(most, fabsf(x[i]));
    for (int64_t i = first; i < first + run; i++)
      x[i] = integer && most > 0 ? rintf(x[i] * (127.0f / most)) * (most / 127.0f)
                                 : wide(nearest_bf16(x[i]));
  }
}

static inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

static inline double gelu(double x) { return x * (1.0 + erf(x * sqrt(0.5))) / 2.0; }

static inline double gelu_tanh(double x) {
  return x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) / 2.0;
}

static inline double activated(const kt_activation *a, double gate, double up) {
  const double alpha = (double)a->alpha, beta = (double)a->beta, limit = (double)a->limit;
  const double g = fmin(gate, limit), u = fmax(fmin(up, limit), -limit);
  switch (a->function) {
  case KT_GELU: return gelu(g) * u;
  case KT_GELU_TANH: return gelu_tanh(g) * u;
  case KT_RELU2: return u > 0.0 ? u * u : 0.0;
  case KT_RELU: return u > 0.0 ? u : 0.0;
  case KT_UNGATED_GELU: return gelu(u);
  case KT_UNGATED_GELU_TANH: return gelu_tanh(u);
  case KT_SWIGLU_CLAMPED: return fmin(gate * sigmoid(gate), limit) * u;
  case KT_SOFTCAP: return alpha * tanh(g / alpha) * sigmoid(g) * beta * tanh(u / beta);
  default: return g * sigmoid(alpha * g) * (u + beta);
  }
}

static inline float bias_of(const float *bias, int64_t row) { return bias ? bias[row] : 0.0f; }

#endif
