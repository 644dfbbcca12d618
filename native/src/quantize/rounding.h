/* rounding.h - the scalar rules that INT8 and INT4 share (docs/formats.md). */
#ifndef KT_ROUNDING_H
#define KT_ROUNDING_H

#include "ktconv.h"

/* kt_round_row multiplies and then adds: one fused operation, or a reordering, gives other
 * codes. GCC fuses by default outside of ISO mode. */
#if defined(__FAST_MATH__)
#error "the format's roundings need a build without -ffast-math"
#elif defined(__FP_FAST_FMAF) && defined(__GNUC__) && !defined(__clang__) &&                       \
    !defined(__STRICT_ANSI__)
#error "the format's roundings need -std=c11, which leaves products unfused"
#endif

#include "../simd/bits.h"

enum { KT_NONFINITE_BITS = 0x7f800000 }; /* magnitudes from here on are Inf or NaN */

/* Rows whose maximum is below this need kt_flush element by element; above it (2^-100) a
 * denormal is less than 2^-18 of a step and rounds to zero by itself. */
enum { KT_FLUSH_BITS = 0x0d800000 };

/* Flush to zero: the format knows no denormals, neither in weights nor in scales. */
static inline float kt_flush(float value) {
  const uint32_t bits = kt_bits(value);
  return kt_float(bits & (0u - (uint32_t)((bits & 0x7fffffffu) >= 0x00800000u)));
}

/* Bits of the largest magnitude in a row; magnitudes order like their bits. */
static inline uint32_t kt_row_max_bits(const float *row, int64_t cols) {
  int32_t max = 0;
  for (int64_t k = 0; k < cols; k++) {
    const int32_t magnitude = (int32_t)(kt_bits(row[k]) & 0x7fffffffu);
    max = magnitude > max ? magnitude : max;
  }
  return (uint32_t)max;
}

/* Nearest integer, ties to even, for |y| < 2^22: 1.5*2^23 has no fraction bits left. */
static inline int32_t kt_round_even(float y) {
  return (int32_t)(kt_bits(y + 12582912.0f) - 0x4b400000u);
}

static inline float kt_reciprocal(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

/* An 8-bit code for each element of a row. */
static inline void kt_round_row(const float *restrict row, int64_t cols, float inverse,
                                int8_t *restrict codes) {
  for (int64_t k = 0; k < cols; k++) codes[k] = (int8_t)kt_round_even(kt_flush(row[k]) * inverse);
}

/* The same of codes that stop at -top and top. */
static inline void kt_round_row_within(const float *restrict row, int64_t cols, float inverse,
                                       float top, int8_t *restrict codes) {
  for (int64_t k = 0; k < cols; k++) {
    const float y = kt_flush(row[k]) * inverse, least = y < top ? y : top;
    codes[k] = (int8_t)kt_round_even(least > -top ? least : -top);
  }
}

#endif
