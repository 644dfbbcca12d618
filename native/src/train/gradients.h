/* gradients.h - what a backward pass does besides matrix products.
 *
 * Every operation is spelled out, so that each level gives the same bits. */
#ifndef KT_GRADIENTS_H
#define KT_GRADIENTS_H

#include "../moe/epilogue.h"

/* From the gradient of the middle h = function(gate, up) to those of gate and up; 32 columns of
 * one expert's tokens. gate and up are those that the forward has saved, biases added, before any
 * clamp. With d = base + lora, for each token:
 *   d_gate  bf16((weight * d) * dh/dgate)
 *   d_up    bf16((weight * d) * dh/dup)
 *   middle  bf16(h)
 *   dot     sum over the columns of base * q, q being what the down product has read:
 *           codes * code_scale, or without codes bf16(h). In this order:
 *           s[r] = fma(base[16 + r], q[16 + r], base[r] * q[r]), r < 16;
 *           s[r] += s[r + 8], + 4, + 2, + 1.
 * Derivatives are those of torch.clamp (1 at the limits, 0 beyond); that of max(u, 0) is 0 at 0.
 * h and its derivatives: ../moe/activation.h. They are finite for finite gate and up
 * where their products are. A NaN goes where IEEE 754 takes it, a clamp has derivative 1 there; all
 * NaN results have the same bits. */
typedef struct kt_inner_back {
  const float *base, *lora;  /* [tokens][32]; lora: NULL for none */
  const uint16_t *gate, *up; /* bf16; a token `saved_stride` elements after the other; gate: if the
                                function has one */
  const float *weight;       /* [tokens] */
  const int8_t *codes;       /* of h; NULL, or a token `code_stride` bytes after the other */
  const float *code_scale;   /* a token `code_scale_stride` floats after the other */
  int64_t tokens, saved_stride, code_stride, code_scale_stride, stride;
  uint16_t *d_gate, *d_up; /* bf16, a token `stride` elements after the other; d_gate: if gated */
  uint16_t *middle;        /* NULL, or the same */
  float *dot;              /* [tokens] */
} kt_inner_back;

typedef void kt_activate_back_fn(const kt_activation *activation, const kt_inner_back *back);

/* Bits of NaN. */
#define KT_BF16_NAN 0x7fc0u
#define KT_F32_NAN 0x7fc00000u

/* A level writes one activate_back(function, activation, back), as in epilogue.h. */
#define KT_DEFINE_ACTIVATE_BACK(function)                                                          \
  static void activate_back_##function(const kt_activation *activation,                            \
                                       const kt_inner_back *back) {                                \
    activate_back(function, activation, back);                                                     \
  }
#define KT_ACTIVATE_BACK_CELL(function) [function] = activate_back_##function,

/* out[j][c] += sum over i < count, ascending, of a[i][j] * b[i][c], one fma each, which begins with
 * what out has, or with 0 where it is fresh. j < rank, c < cols, cols % 32 == 0. b: bf16 rows, row
 * i at b + (index ? index[i] : i) * b_stride bytes, 64-byte aligned. out: element (j, c) at out[j *
 * row + c * col], of which one of row and col is 1. Elements that the sums do not name are neither
 * read nor written. */
typedef struct kt_outer {
  const float *a; /* row i at a + i * a_stride */
  const uint8_t *b;
  const int32_t *index; /* NULL, or [count] */
  int64_t count, rank, cols, a_stride, b_stride;
  float *out;
  int64_t row, col;
  int fresh;
  uint8_t *scratch; /* for kt_outer_amx */
} kt_outer;

typedef void kt_outer_fn(const kt_outer *outer);

/* The fastest for the level in use. With AMX, sums of up to KT_OUTER_SLOTS slots are computed in
 * another order and added then, of factors a that are cut to 16 or more bits: 2^-16 of a product.
 * A sum with an Inf in it may be a NaN. scratch: KT_OUTER_SCRATCH bytes, 64-byte aligned. */
enum { KT_OUTER_SLOTS = 192, KT_OUTER_SCRATCH = (48 + 2 * 12 + 4) * 1024 };
kt_outer_fn kt_outer_amx;
kt_outer_fn *kt_outer_best(void);

/* 32 columns of gate or up of some tokens, of which a forward keeps bf16(product + bias), ties to
 * even. A magnitude that rounding takes across `cut` becomes the next number on its own side. */
typedef struct kt_keep {
  const float *products; /* [tokens][32] */
  const float *bias;     /* [32], or NULL */
  int64_t tokens;
  float cut;      /* INFINITY: none */
  uint16_t *rows; /* a token `stride` elements after the other; NULL: nothing is kept */
  int64_t stride;
} kt_keep;

/* Dropout of the inputs of LoRA: which elements of a row are dropped follows from the seed, the
 * pair (token * top_k + choice), the input (0: x, 1: the middle) and the column alone (random.h),
 * for columns below 2^32. */
typedef struct kt_drop {
  uint64_t seed;
  uint32_t below; /* an element is dropped where its random 32 bits are below this; 0: none */
  int32_t input;
} kt_drop;

typedef struct kt_gradients {
  kt_activate_back_fn *activate[KT_GATE_FUNCTIONS];
  kt_outer_fn *outer;
  void (*keep)(const kt_keep *keep, int64_t first, int64_t end); /* tokens first .. end - 1 */
  /* Sets columns first .. first + n - 1 of the row of `pair` to 0 where they are dropped; row[0] is
   * column `first`. n % 32 == 0. */
  void (*drop_bf16)(const kt_drop *drop, int64_t pair, int64_t first, int64_t n, uint16_t *row);
  void (*drop_f32)(const kt_drop *drop, int64_t pair, int64_t first, int64_t n, float *row);
} kt_gradients;

extern const kt_gradients kt_gradients_scalar, kt_gradients_avx512;
extern const kt_gradients *const kt_gradients_of[KT_LEVELS]; /* KT_CELL */

#endif
