/* audit_source.h - values of the source as the audit reads them: from the definition of their
 * number formats, not from source/. */
#ifndef KT_AUDIT_SOURCE_H
#define KT_AUDIT_SOURCE_H

#include "audit.h"

#include <string.h>

/* Fused products would make the bits of sums depend on the level; GCC's -std=c11 has none. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* Loops become vectors of the level only in functions that have its target. */
#define INLINE static inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* a where `first`, else b; without a branch, which would keep loops from becoming vectors. */
INLINE uint32_t choose(int first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - (uint32_t)first;
  return (a & mask) | (b & ~mask);
}

/* binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; denormals become normal. */
INLINE float f16_value(uint16_t half) {
  const uint32_t bits = half, sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  const uint32_t denormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  const uint32_t finite = choose(magnitude < 0x0400u, denormal, normal);
  return from_bits(sign | choose(magnitude < 0x7c00u, finite, special));
}

/* E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f is NaN, there is no infinity. */
INLINE float f8_value(uint8_t byte) {
  const uint32_t bits = byte, sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  const uint32_t denormal = bits_of((float)(int32_t)magnitude * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t finite = choose(magnitude < 8u, denormal, normal);
  return from_bits(sign | choose(magnitude < 0x7fu, finite, 0x7fc00000u));
}

INLINE float to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

INLINE float scale_at(const kt_matrix *m, int64_t row, int64_t col) {
  const int64_t y = (m->row_origin + row) / m->block_rows;
  return m->block_scale[y * m->scale_stride + (m->col_origin + col) / m->block_cols];
}

/* Columns of a row up to where the next block of scales begins, at most `cols`. */
INLINE int64_t block_run(const kt_matrix *m, int64_t col, int64_t cols) {
  return least(cols, m->block_cols - (m->col_origin + col) % m->block_cols);
}

/* Stored elements from a first row and column of the source on; strides in elements. */
typedef struct stored {
  const uint8_t *data;
  int64_t row_stride, col_stride;
} stored;

INLINE int stored_size(const kt_matrix *m) {
  return m->dtype == KT_F32 ? 4 : m->dtype == KT_F8_E4M3 ? 1 : 2;
}

INLINE stored stored_from(const kt_matrix *m, int64_t row, int64_t col) {
  const int64_t at = row * m->row_stride + col * m->col_stride;
  return (stored){(const uint8_t *)m->data + stored_size(m) * at, m->row_stride, m->col_stride};
}

INLINE stored rows_on(stored s, int size, int64_t rows) {
  return (stored){s.data + size * rows * s.row_stride, s.row_stride, s.col_stride};
}

INLINE stored cols_on(stored s, int size, int64_t cols) {
  return (stored){s.data + size * cols * s.col_stride, s.row_stride, s.col_stride};
}

/* A copy of the columns of 32 rows that lie side by side: row after row would read each line of
 * memory once per row, and lines that are a power of two apart drive each other out of the caches.
 */
INLINE stored gathered(stored s, int size, int64_t cols, uint8_t *room) {
  const size_t run = (size_t)(2 * KT_AUDIT_ROWS * size);
  for (int64_t c = 0; c < cols; c++)
    memcpy(room + (size_t)c * run, s.data + size * c * s.col_stride, run);
  return (stored){room, 1, 2 * KT_AUDIT_ROWS};
}

/* The bytes of 64 columns of row r, side by side. */
INLINE void stored_bytes(stored s, int64_t r, int size, uint8_t *out) {
  const uint8_t *from = s.data + size * r * s.row_stride;
  if (s.col_stride == 1)
    memcpy(out, from, (size_t)(size * KT_AUDIT_COLS));
  else
    for (int c = 0; c < KT_AUDIT_COLS; c++, from += size * s.col_stride)
      memcpy(out + c * size, from, (size_t)size);
}

/* The same, widened: one loop per number format, so that compilers make vectors of them. */
INLINE void stored_values(const kt_matrix *m, stored s, int64_t r, float *out) {
  uint8_t byte[KT_AUDIT_COLS];
  uint16_t half[KT_AUDIT_COLS];
  if (m->dtype == KT_F32) {
    stored_bytes(s, r, 4, (uint8_t *)out);
  } else if (m->dtype == KT_F8_E4M3) {
    stored_bytes(s, r, 1, byte);
    for (int c = 0; c < KT_AUDIT_COLS; c++) out[c] = f8_value(byte[c]);
  } else {
    stored_bytes(s, r, 2, (uint8_t *)half);
    if (m->dtype == KT_F16)
      for (int c = 0; c < KT_AUDIT_COLS; c++) out[c] = f16_value(half[c]);
    else
      for (int c = 0; c < KT_AUDIT_COLS; c++) out[c] = from_bits((uint32_t)half[c] << 16);
  }
}

/* What the packed weights of 64 columns of row `row` should stand for; `r`: that row in s. */
INLINE void source_values(const kt_matrix *m, stored s, int64_t r, int64_t row, int64_t col,
                          float *out) {
  stored_values(m, s, r, out);
  if (m->block_scale)
    for (int64_t c = 0, run; c < KT_AUDIT_COLS; c += run) {
      const float scale = scale_at(m, row, col + c);
      run = block_run(m, col + c, KT_AUDIT_COLS - c);
      for (int64_t i = c; i < c + run; i++) out[i] *= scale;
    }
  if (m->round_to_bf16)
    for (int c = 0; c < KT_AUDIT_COLS; c++) out[c] = to_bf16(out[c]);
}

#endif
