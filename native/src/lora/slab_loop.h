/* slab_loop.h - kt_slabs_fn in plain C, for compilers to make vectors of. */
#ifndef KT_SLAB_LOOP_H
#define KT_SLAB_LOOP_H

#include "../simd/bits.h"
#include "slabs.h"

#include <math.h>
#include <string.h>

/* Two columns of 16 rows. */
static inline __attribute__((always_inline)) void kt_slab_line(const uint8_t *line, const float *x,
                                                               float *even, float *odd) {
  uint32_t pair[KT_SLAB_ROWS];
  memcpy(pair, line, sizeof pair);
  for (int r = 0; r < KT_SLAB_ROWS; r++) {
    even[r] = fmaf(kt_float(pair[r] << 16), x[0], even[r]);
    odd[r] = fmaf(kt_float(pair[r] & 0xffff0000u), x[1], odd[r]);
  }
}

/* 32 columns, or fewer. */
static inline __attribute__((always_inline)) void kt_slab_block(const uint8_t *slab, int64_t lines,
                                                                const float *x, float *sum) {
  float even[KT_SLAB_ROWS] = {0}, odd[KT_SLAB_ROWS] = {0};
  for (int64_t q = 0; q < lines; q++) kt_slab_line(slab + q * KT_SLAB_LINE, x + 2 * q, even, odd);
  for (int r = 0; r < KT_SLAB_ROWS; r++) sum[r] += even[r] + odd[r];
}

/* Two blocks at a time, as their sums do not wait for each other. */
static inline __attribute__((always_inline)) void kt_slab_row(const uint8_t *slab, int64_t lines,
                                                              const float *x, float *out) {
  enum { SIZE = KT_SLAB_BLOCK * KT_SLAB_LINE };
  float sum[KT_SLAB_ROWS] = {0};
  int64_t q = 0;
  for (; q + 2 * KT_SLAB_BLOCK <= lines; q += 2 * KT_SLAB_BLOCK) {
    const uint8_t *const at = slab + q * KT_SLAB_LINE;
    float even[2][KT_SLAB_ROWS] = {{0}}, odd[2][KT_SLAB_ROWS] = {{0}};
    for (int64_t i = 0; i < KT_SLAB_BLOCK; i++) {
      kt_slab_line(at + i * KT_SLAB_LINE, x + 2 * (q + i), even[0], odd[0]);
      kt_slab_line(at + SIZE + i * KT_SLAB_LINE, x + 2 * (q + KT_SLAB_BLOCK + i), even[1], odd[1]);
    }
    for (int b = 0; b < 2; b++)
      for (int r = 0; r < KT_SLAB_ROWS; r++) sum[r] += even[b][r] + odd[b][r];
  }
  for (; q < lines; q += KT_SLAB_BLOCK) {
    const int64_t some = lines - q < KT_SLAB_BLOCK ? lines - q : KT_SLAB_BLOCK;
    kt_slab_block(slab + q * KT_SLAB_LINE, some, x + 2 * q, sum);
  }
  memcpy(out, sum, sizeof sum);
}

static inline __attribute__((always_inline)) void kt_slabs_loop(const kt_slabs_at *p,
                                                                const float *const *rows,
                                                                int64_t tokens, float *const *out,
                                                                int64_t step) {
  for (int64_t n = 0; n < p->count; n++)
    for (int64_t i = 0; i < tokens; i++)
      kt_slab_row(p->slab + n * p->apart, p->lines, rows[i],
                  out[i] + n / 2 * step + n % 2 * KT_SLAB_ROWS);
}

#endif
