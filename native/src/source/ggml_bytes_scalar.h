/* ggml_bytes_scalar.h - steps that the layouts of ggml's blocks share, in plain C. */
#ifndef KT_GGML_BYTES_H
#define KT_GGML_BYTES_H

#include "../simd/unroll.h"
#include "decode_loops.h"

/* Clang would fuse the product with the difference; GCC's -std=c11 does not. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

KT_INLINE float ggml_half(const uint8_t *at) { return kt_widen_f16(at); }

/* Low nibbles of `count` bytes (8, 16, 32 or 64), then the high ones, less `zero`. */
KT_INLINE void ggml_nibbles(const uint8_t *from, const int count, const int zero, int8_t *code) {
  KT_LOOP
  for (int i = 0; i < count; i++) code[i] = (int8_t)((from[i] & 15) - zero);
  KT_LOOP
  for (int i = 0; i < count; i++) code[count + i] = (int8_t)((from[i] >> 4) - zero);
}

/* Bit i of 32 as 16 * bit on top of nibble i, less `zero`. */
KT_INLINE void ggml_fifth_bits(const uint8_t from[4], const int zero, int8_t code[32]) {
  KT_LOOP
  for (int i = 0; i < 32; i++)
    code[i] = (int8_t)((code[i] | (from[i / 8] >> i % 8 & 1) << 4) - zero);
}

/* Of `count` codes 0..15 the number in a table; count is a multiple of 16. */
KT_INLINE void ggml_look_up(const int8_t table[16], const int count, int8_t *code) {
  for (int i = 0; i < count; i++) code[i] = table[code[i]];
}

/* code * scale - offset, or without one the product; count is a multiple of 16. */
KT_INLINE void ggml_values(const int8_t *code, const int count, float scale, float offset,
                           const int offsets, float *restrict out) {
  KT_LOOP
  for (int i = 0; i < count; i++) {
    const float value = (float)code[i] * scale;
    out[i] = offsets ? value - offset : value;
  }
}

#endif
