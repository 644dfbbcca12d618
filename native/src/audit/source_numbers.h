/* source_numbers.h - number formats of the source as the audit reads them: from their definitions,
 * not from source/. */
#ifndef KT_AUDIT_SOURCE_NUMBERS_H
#define KT_AUDIT_SOURCE_NUMBERS_H

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

/* E4M3FN: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f is NaN, there is no infinity. In
 * the places of binary32 (bias 127) a number is 2^-120 of itself, denormals too. Those places are
 * in the upper 16 bits, and vectors of 16 bits have twice as many lanes. */
INLINE float f8_value(uint8_t byte) {
  const uint16_t in_place = (uint16_t)((uint16_t)(int16_t)(int8_t)byte << 4) & 0x87f0u;
  const uint16_t nan = (in_place & 0x07f0u) == 0x07f0u ? 0x7fc0u : 0;
  return from_bits((uint32_t)(in_place | nan) << 16) * 0x1p120f;
}

INLINE float to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  return from_bits((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

/* E2M1: a sign and 0, 1/2, 1, 3/2, 2, 3, 4 or 6, counted in halves. -0 becomes 0. */
INLINE int8_t f4_halves(uint8_t nibble) {
  const uint8_t magnitude = nibble & 7;
  const uint8_t halves =
      (uint8_t)(magnitude + (magnitude > 4) + (magnitude > 5) + 3 * (magnitude > 6));
  return (int8_t)(nibble & 8 ? -halves : halves);
}

INLINE float f4_value(uint32_t nibble) { return (float)f4_halves((uint8_t)nibble) * 0.5f; }

/* E2M3: a sign, and eighths: 0 to 15, then 16 to 30 in steps of 2, then 32 to 60 in steps of 4. */
INLINE float f6_value(uint8_t code) {
  const int32_t magnitude = code & 31, low = magnitude & 7, exponent = magnitude >> 3;
  const int32_t eighths = exponent ? (8 + low) << (exponent - 1) : low;
  return (float)(code & 32 ? -eighths : eighths) / 8.0f;
}

/* 1 sign, 3 bits of magnitude whose last one is worth a quarter. */
INLINE float quarters_value(uint32_t nibble) {
  const float magnitude = (float)(int32_t)(nibble & 7u) / 4.0f;
  return from_bits(bits_of(magnitude) ^ (nibble >> 3) << 31);
}

/* Bit 3 is worth -8. */
INLINE float i4_value(uint32_t nibble) {
  return (float)((int32_t)(nibble & 7u) - (int32_t)(nibble & 8u));
}

#endif
