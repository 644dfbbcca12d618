/* random.h - the random bits of dropout: any element's without those before it.
 *
 * A row has a key of 64 bits, a column 32 bits of the row: three rounds of shift, xor and multiply
 * (constants found by C. Wellons, hash-prospector) with half of the key before the first round and
 * half before the second. */
#ifndef KT_RANDOM_H
#define KT_RANDOM_H

#include <stdint.h>

enum {
  KT_RANDOM_SHIFT_0 = 17,
  KT_RANDOM_SHIFT_1 = 11,
  KT_RANDOM_SHIFT_2 = 15,
  KT_RANDOM_SHIFT_3 = 14
};
#define KT_RANDOM_FACTOR_0 0xed5ad4bbu
#define KT_RANDOM_FACTOR_1 0xac4c1b51u
#define KT_RANDOM_FACTOR_2 0x31848babu

typedef struct kt_row_key {
  uint32_t first, second;
} kt_row_key;

/* The output function of SplitMix64. */
static inline uint64_t kt_mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* Rows of one seed all have different keys. */
static inline kt_row_key kt_key_of_row(uint64_t seed, int64_t pair, int32_t input) {
  const uint64_t row = 2 * (uint64_t)pair + (uint64_t)input, key = kt_mixed(kt_mixed(seed) ^ row);
  return (kt_row_key){(uint32_t)key, (uint32_t)(key >> 32)};
}

static inline uint32_t kt_random_bits(kt_row_key key, uint32_t column) {
  uint32_t x = column + key.first;
  x = (x ^ (x >> KT_RANDOM_SHIFT_0)) * KT_RANDOM_FACTOR_0;
  x = (x ^ (x >> KT_RANDOM_SHIFT_1)) + key.second;
  x *= KT_RANDOM_FACTOR_1;
  x = (x ^ (x >> KT_RANDOM_SHIFT_2)) * KT_RANDOM_FACTOR_2;
  return x ^ (x >> KT_RANDOM_SHIFT_3);
}

#endif
