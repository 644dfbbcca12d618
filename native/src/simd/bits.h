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

#endif
