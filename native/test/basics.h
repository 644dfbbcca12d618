/* basics.h - random numbers, memory between unreadable pages, and stored numbers, for the programs
 * that check the library. Nothing is the library's own. */
#ifndef KT_TEST_BASICS_H
#define KT_TEST_BASICS_H

#include "ktconv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int failures;

/* With the emulator linked in, AMX runs on any x86-64 CPU with AVX-512 BF16. */
static inline void assume_amx(void) {
#if defined(__x86_64__)
  kt_cpu cpu;
  kt_cpu_detect(&cpu);
  if (cpu.avx512_bf16 && !cpu.amx_permission) setenv("KTCONV_ASSUME", "amx", 0);
#endif
}

/* ---- Random numbers --------------------------------------------------------- */

static uint64_t state = 1;

static inline uint64_t draw(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

/* -1 .. 1 */
static inline float unit(void) { return (float)(draw() >> 40) / 16777216.0f * 2.0f - 1.0f; }

/* ---- Memory ----------------------------------------------------------------- */

static inline size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static inline size_t whole_pages(size_t size) {
  return (size + page_size() - 1) / page_size() * page_size();
}

/* `inner` bytes of whole pages, between two that are unreadable. */
static inline uint8_t *new_pages(size_t inner) {
  const size_t page = page_size();
  uint8_t *const map =
      mmap(NULL, inner + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED || mprotect(map, page, PROT_NONE) ||
      mprotect(map + page + inner, page, PROT_NONE))
    exit(2);
  return map + page;
}

static inline void free_pages(uint8_t *pages, size_t inner) {
  munmap(pages - page_size(), inner + 2 * page_size());
}

/* `size` bytes that end at an unreadable page, until release() or the end of the program. */
static inline void *guarded(size_t size) {
  const size_t inner = whole_pages(size);
  return new_pages(inner) + inner - size;
}

static inline void release(void *memory, size_t size) {
  const size_t inner = whole_pages(size);
  free_pages((uint8_t *)memory + size - inner, inner);
}

typedef struct mapping {
  uint8_t *pages;
  size_t inner;
} mapping;

static mapping mappings[64];
static int mapping_count;

/* `size` bytes that end (or begin) at an unreadable page, until release_all(), with which every
 * check ends: the system allows a process some 65000 mappings. */
static inline void *held_at(size_t size, int at_end) {
  const size_t inner = whole_pages(size);
  if (mapping_count == sizeof mappings / sizeof *mappings) exit(2);
  uint8_t *const pages = new_pages(inner);
  mappings[mapping_count++] = (mapping){pages, inner};
  return pages + (at_end ? inner - size : 0);
}

static inline void *held(size_t size) { return held_at(size, 1); }

static inline void release_all(void) {
  for (; mapping_count; mapping_count--)
    free_pages(mappings[mapping_count - 1].pages, mappings[mapping_count - 1].inner);
}

/* ---- Stored numbers ---------------------------------------------------------- */

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float wide(uint16_t half) { return of_bits((uint32_t)half << 16); }

/* bf16, the rest being cut off. */
static inline uint16_t bf16(float value) { return (uint16_t)(bits_of(value) >> 16); }

/* bf16, ties to even, by what is cut off; NaN as the hardware's. */
static inline uint16_t nearest_bf16(float value) {
  const uint32_t bits = bits_of(value), low = bits & 0xffff, high = bits >> 16;
  if (isnan(value)) return (uint16_t)(high | 0x40);
  return (uint16_t)(high + (low > 0x8000 || (low == 0x8000 && (high & 1))));
}

static inline float half_value(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? ldexpf((float)(1024 + mantissa), exponent - 25)
                                    : ldexpf((float)mantissa, -24);
  return half & 0x8000 ? -size : size;
}

/* Numbers of KT_F32, KT_BF16 and KT_F16. */
static inline size_t value_size(int dtype) { return dtype == KT_F32 ? 4 : 2; }

static inline float value_at(int dtype, const void *data, int64_t i) {
  if (dtype == KT_F32) return ((const float *)data)[i];
  const uint16_t bits = ((const uint16_t *)data)[i];
  return dtype == KT_BF16 ? wide(bits) : half_value(bits);
}

#endif
