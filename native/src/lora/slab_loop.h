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

static inline __attribute__((always_inline)) void kt_slab_row(const uint8_t *slab, int64_t lines,
                                                              const float *x, float *out) {
  float sum[4][KT_SLAB_ROWS] = {{0}};
  int64_t q = 0;
  for (; q + 2 <= lines; q += 2) {
    kt_slab_line(slab + q * KT_SLAB_LINE, x + 2 * q, sum[0], sum[1]);
    kt_slab_line(slab + (q + 1) * KT_SLAB_LINE, x + 2 * q + 2, sum[2], sum[3]);
  }
  if (q < lines) kt_slab_line(slab + q * KT_SLAB_LINE, x + 2 * q, sum[0], sum[1]);
  for (int r = 0; r < KT_SLAB_ROWS; r++)
    out[r] += (sum[0][r] + sum[1][r]) + (sum[2][r] + sum[3][r]);
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
