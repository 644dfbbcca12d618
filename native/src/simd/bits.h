/* bits.h - a binary32 and its bits. */
#ifndef KT_BITS_H
#define KT_BITS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t kt_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* The float of these bits. */
static inline float kt_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* The nearest bf16, ties to even; a NaN stays a NaN. */
static inline uint16_t kt_bf16_bits(float value) {
  const uint32_t bits = kt_bits(value), rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : rounded) >> 16);
}

#endif
