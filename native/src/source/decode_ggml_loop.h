/* decode_ggml_loop.h - blocks of ggml as binary32, included by one file per level.
 *
 * A block is unpacked to codes of 8 bits and, for each run of columns, a scale and an offset; then
 * value = code * scale - offset, each operation rounded to binary32. What the layouts have in
 * common is in ggml_bytes_scalar.h or ggml_bytes_x86.h, whichever the file included before; the
 * rest are loops over constants, of which compilers make what the level allows. The layouts are
 * those of ggml; docs/encodings.md lists them. */
#ifndef KT_DECODE_GGML_LOOP_H
#define KT_DECODE_GGML_LOOP_H

#include "../simd/unroll.h"
#include "decode_loops.h"

#include <string.h>

enum { BLOCK_COLS = 256, RUNS = BLOCK_COLS / 16 };

typedef struct block {
  int8_t code[BLOCK_COLS];
  float scale[RUNS], offset[RUNS]; /* of runs of columns */
} block;

/* ---- What several types share ------------------------------------------------ */

/* Pairs of bits: of 32 bytes the lowest, then the next ones, and so on. */
KT_INLINE void pairs_of_bits(const uint8_t from[64], const int zero, int8_t code[256]) {
  for (int h = 0; h < 2; h++)
    for (int s = 0; s < 4; s++)
      for (int l = 0; l < 32; l++)
        code[128 * h + 32 * s + l] = (int8_t)((from[32 * h + l] >> 2 * s & 3) - zero);
}

/* Scales and minima of 6 bits: of 8 runs of 32 columns in Q4_K and Q5_K. */
KT_INLINE void scales_of_6_bits(const uint8_t *from, float d, float dmin, block *b) {
  for (int j = 0; j < 4; j++) {
    b->scale[j] = d * (float)(from[j] & 63);
    b->offset[j] = dmin * (float)(from[j + 4] & 63);
    b->scale[j + 4] = d * (float)((from[j + 8] & 15) | (from[j] >> 6) << 4);
    b->offset[j + 4] = dmin * (float)((from[j + 8] >> 4) | (from[j + 4] >> 6) << 4);
  }
}

static const int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
/* E2M1 doubled, so that scales are halved; ggml has no negative zero. */
static const int8_t e2m1_table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* 2^(byte - 128), where 0 and 1 are denormals. */
KT_INLINE float half_of_e8m0(uint8_t byte) {
  return kt_float(byte < 2 ? 0x00200000u << byte : (uint32_t)(byte - 1) << 23);
}

/* Half of the E4M3 number whose sign bit is ignored; 0x7f is 0, as in ggml. With an exponent field
 * of half precision, which has another bias, the same bits are 2^-8 of the number. */
KT_INLINE float half_of_ue4m3(uint8_t byte) {
  const uint16_t half = (uint16_t)((byte & 0x7f) << 7);
  uint8_t bytes[2];
  memcpy(bytes, &half, sizeof half);
  return kt_float(kt_select(byte == 0x7f, 0, kt_bits(ggml_half(bytes) * 128.0f)));
}

/* ---- One block of each type --------------------------------------------------- */

KT_INLINE void unpack_q4_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  ggml_nibbles(at + 2, 16, 8, b->code);
}

KT_INLINE void unpack_q4_1(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  b->offset[0] = -ggml_half(at + 2);
  ggml_nibbles(at + 4, 16, 0, b->code);
}

KT_INLINE void unpack_q5_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  ggml_nibbles(at + 6, 16, 0, b->code);
  ggml_fifth_bits(at + 2, 16, b->code);
}

KT_INLINE void unpack_q5_1(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  b->offset[0] = -ggml_half(at + 2);
  ggml_nibbles(at + 8, 16, 0, b->code);
  ggml_fifth_bits(at + 4, 0, b->code);
}

KT_INLINE void unpack_q8_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  memcpy(b->code, at + 2, 32);
}

KT_INLINE void unpack_q2_k(const uint8_t *at, block *b) {
  const float d = ggml_half(at + 80), dmin = ggml_half(at + 82);
  for (int j = 0; j < 16; j++) {
    b->scale[j] = d * (float)(at[j] & 15);
    b->offset[j] = dmin * (float)(at[j] >> 4);
  }
  pairs_of_bits(at + 16, 0, b->code);
}

KT_INLINE void unpack_q3_k(const uint8_t *at, block *b) {
  const uint8_t *const scales = at + 96;
  const float d = ggml_half(at + 108);
  for (int j = 0; j < 16; j++) {
    const int low = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
    const int high = scales[8 + j % 4] >> 2 * (j / 4) & 3;
    b->scale[j] = d * (float)((low | high << 4) - 32);
  }
  pairs_of_bits(at + 32, 4, b->code);
  for (int j = 0; j < 8; j++) /* the mask's bit j is for columns 32 j on */
    for (int l = 0; l < 32; l++)
      b->code[32 * j + l] = (int8_t)(b->code[32 * j + l] + ((at[l] >> j & 1) << 2));
}

KT_INLINE void unpack_q4_k(const uint8_t *at, block *b) {
  scales_of_6_bits(at + 4, ggml_half(at), ggml_half(at + 2), b);
  for (int j = 0; j < 4; j++) ggml_nibbles(at + 16 + 32 * j, 32, 0, b->code + 64 * j);
}

KT_INLINE void unpack_q5_k(const uint8_t *at, block *b) {
  scales_of_6_bits(at + 4, ggml_half(at), ggml_half(at + 2), b);
  for (int j = 0; j < 4; j++) ggml_nibbles(at + 48 + 32 * j, 32, 0, b->code + 64 * j);
  for (int j = 0; j < 8; j++)
    for (int l = 0; l < 32; l++)
      b->code[32 * j + l] = (int8_t)(b->code[32 * j + l] | (at[16 + l] >> j & 1) << 4);
}

KT_INLINE void unpack_q6_k(const uint8_t *at, block *b) {
  const float d = ggml_half(at + 208);
  for (int j = 0; j < 16; j++) b->scale[j] = d * (float)(int8_t)at[192 + j];
  for (int h = 0; h < 2; h++) {
    ggml_nibbles(at + 64 * h, 64, 0, b->code + 128 * h);
    for (int s = 0; s < 4; s++)
      for (int l = 0; l < 32; l++) {
        int8_t *const code = b->code + 128 * h + 32 * s + l;
        *code = (int8_t)((*code | (at[128 + 32 * h + l] >> 2 * s & 3) << 4) - 32);
      }
  }
}

KT_INLINE void unpack_iq4_nl(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  ggml_nibbles(at + 2, 16, 0, b->code);
  ggml_look_up(iq4_table, 32, b->code);
}

KT_INLINE void unpack_iq4_xs(const uint8_t *at, block *b) {
  const float d = ggml_half(at);
  const int high = at[2] | at[3] << 8;
  for (int j = 0; j < 8; j++) {
    const int low = at[4 + j / 2] >> 4 * (j % 2) & 15;
    b->scale[j] = d * (float)((low | (high >> 2 * j & 3) << 4) - 32);
    ggml_nibbles(at + 8 + 16 * j, 16, 0, b->code + 32 * j);
  }
  ggml_look_up(iq4_table, 256, b->code);
}

KT_INLINE void unpack_mxfp4(const uint8_t *at, block *b) {
  b->scale[0] = half_of_e8m0(at[0]);
  ggml_nibbles(at + 1, 16, 0, b->code);
  ggml_look_up(e2m1_table, 32, b->code);
}

KT_INLINE void unpack_nvfp4(const uint8_t *at, block *b) {
  for (int s = 0; s < 4; s++) {
    b->scale[s] = half_of_ue4m3(at[s]);
    ggml_nibbles(at + 4 + 8 * s, 8, 0, b->code + 16 * s);
  }
  ggml_look_up(e2m1_table, 64, b->code);
}

/* Five numbers 0..2 of a byte: it is 256/243 of them in base 3, the first the highest digit, so
 * that a digit is what leaves the byte at a multiplication by 3. */
KT_INLINE void base_3_digits(const uint8_t *from, const int bytes, const int digits, int8_t *code) {
  static const uint8_t power[5] = {1, 3, 9, 27, 81};
  for (int n = 0; n < digits; n++)
    for (int i = 0; i < bytes; i++)
      code[bytes * n + i] = (int8_t)(((uint8_t)(from[i] * power[n]) * 3 >> 8) - 1);
}

KT_INLINE void unpack_tq1_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at + 52);
  base_3_digits(at, 32, 5, b->code);
  base_3_digits(at + 32, 16, 5, b->code + 160);
  base_3_digits(at + 48, 4, 4, b->code + 240);
}

KT_INLINE void unpack_tq2_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at + 64);
  pairs_of_bits(at, 1, b->code);
}

KT_INLINE void unpack_q1_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  for (int i = 0; i < 16; i++)
    for (int n = 0; n < 8; n++) b->code[8 * i + n] = (int8_t)(2 * (at[2 + i] >> n & 1) - 1);
}

KT_INLINE void unpack_q2_0(const uint8_t *at, block *b) {
  b->scale[0] = ggml_half(at);
  for (int i = 0; i < 16; i++)
    for (int n = 0; n < 4; n++) b->code[4 * i + n] = (int8_t)((at[2 + i] >> 2 * n & 3) - 1);
}

/* ---- Rows ------------------------------------------------------------------------ */

/* Of each type: its dtype, name here, bytes and columns of a block, columns of a run, and whether
 * runs have offsets. */
#define GGML_TYPES(each)                                                                           \
  each(KT_Q4_0, q4_0, 18, 32, 32, 0) each(KT_Q4_1, q4_1, 20, 32, 32, 1)                            \
      each(KT_Q5_0, q5_0, 22, 32, 32, 0) each(KT_Q5_1, q5_1, 24, 32, 32, 1)                        \
          each(KT_Q8_0, q8_0, 34, 32, 32, 0) each(KT_Q2_K, q2_k, 84, 256, 16, 1)                   \
              each(KT_Q3_K, q3_k, 110, 256, 16, 0) each(KT_Q4_K, q4_k, 144, 256, 32, 1)            \
                  each(KT_Q5_K, q5_k, 176, 256, 32, 1) each(KT_Q6_K, q6_k, 210, 256, 16, 0)        \
                      each(KT_IQ4_NL, iq4_nl, 18, 32, 32, 0)                                       \
                          each(KT_IQ4_XS, iq4_xs, 136, 256, 32, 0)                                 \
                              each(KT_MXFP4, mxfp4, 17, 32, 32, 0)                                 \
                                  each(KT_NVFP4, nvfp4, 36, 64, 16, 0)                             \
                                      each(KT_TQ1_0, tq1_0, 54, 256, 256, 0)                       \
                                          each(KT_TQ2_0, tq2_0, 66, 256, 256, 0)                   \
                                              each(KT_Q1_0, q1_0, 18, 128, 128, 0)                 \
                                                  each(KT_Q2_0, q2_0, 18, 64, 64, 0)

KT_INLINE void block_values(const block *b, const int cols, const int run, const int offsets,
                            float *restrict out) {
  for (int j = 0; j < cols / run; j++)
    ggml_values(b->code + run * j, run, b->scale[j], offsets ? b->offset[j] : 0.0f, offsets,
                out + run * j);
}

/* `blocks` blocks, `step` bytes apart. */
#define ROW_OF_BLOCKS(dtype, name, bytes, cols, run, offsets)                                      \
  static void row_##name(const uint8_t *from, int64_t step, int64_t blocks, float *restrict out) { \
    for (int64_t i = 0; i < blocks; i++) {                                                         \
      block b;                                                                                     \
      unpack_##name(from + i * step, &b);                                                          \
      block_values(&b, cols, run, offsets, out + i * (cols));                                      \
    }                                                                                              \
  }
GGML_TYPES(ROW_OF_BLOCKS)
#undef ROW_OF_BLOCKS

typedef void blocks_fn(const uint8_t *from, int64_t step, int64_t blocks, float *restrict out);

KT_INLINE blocks_fn *blocks_of(int dtype) {
  switch (dtype) {
#define CASE(dtype, name, bytes, cols, run, offsets)                                               \
  case dtype: return row_##name;
    GGML_TYPES(CASE)
#undef CASE
  }
  return NULL;
}

/* A row that may begin and end within a block. */
KT_INLINE void ggml_row(const kt_matrix *m, int64_t row, float *restrict out) {
  const kt_stored_unit unit = kt_dtype_find(m->dtype)->unit;
  blocks_fn *const decode = blocks_of(m->dtype);
  const int64_t step = m->col_stride * unit.bytes;
  const uint8_t *from = (const uint8_t *)m->data + row * m->row_stride * unit.bytes;
  int64_t skipped = m->first_col, left = m->cols;
  while (left) {
    int64_t done = left / unit.cols * unit.cols;
    if (skipped || !done) {
      float whole[BLOCK_COLS];
      decode(from, step, 1, whole);
      done = left < unit.cols - skipped ? left : unit.cols - skipped;
      memcpy(out, whole + skipped, (size_t)done * sizeof *out);
      from += step;
      skipped = 0;
    } else {
      decode(from, step, done / unit.cols, out);
      from += done / unit.cols * step;
    }
    out += done;
    left -= done;
  }
}

KT_INLINE void ggml_rows(const kt_matrix *m, int64_t row, int64_t count, float *out,
                         int64_t stride) {
  for (int64_t r = 0; r < count; r++) {
    ggml_row(m, row + r, out + r * stride);
    kt_finish_row(m, row + r, out + r * stride);
  }
}

#endif
