/* exponential.h - exp(x) in binary32, every operation spelled out, so that all levels give the same
 * bits, whether a compiler vectorizes this or somebody writes it in instructions.
 *
 * n = round(x / ln 2), r = x - n ln 2 in two steps, Taylor's polynomial of degree 7 for exp(r),
 * |r| <= 0.347, times 2^n: relative error below 3e-7. */
#ifndef KT_EXPONENTIAL_H
#define KT_EXPONENTIAL_H

#include "bits.h"
#include "target.h"

#include <math.h>

#define KT_LOG2_E 1.44269504f
#define KT_LN2_HIGH 0.693359375f /* 9 bits: n times it is exact */
#define KT_LN2_LOW -2.12194440e-4f
#define KT_ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer */
#define KT_ROUNDER_BITS 0x4b400000
#define KT_EXP_IS_ZERO -104.0f
#define KT_EXP_IS_INFINITE 89.0f

/* Coefficients from the highest power down. */
static const float kt_exp_taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                                      1.0f / 6,    1.0f / 2,   1.0f,       1.0f};
enum { KT_EXP_TERMS = 8 };

KT_INLINE float kt_horner(const float *terms, int count, float x) {
  float sum = terms[0];
  for (int i = 1; i < count; i++) sum = fmaf(sum, x, terms[i]);
  return sum;
}

/* exp(x) = exp(r) * 2^n. */
typedef struct kt_reduced {
  float r;
  int32_t n;
} kt_reduced;

KT_INLINE kt_reduced kt_reduce(float x) {
  const float shifted = fmaf(x, KT_LOG2_E, KT_ROUNDER), n = shifted - KT_ROUNDER;
  const float r = fmaf(-n, KT_LN2_LOW, fmaf(-n, KT_LN2_HIGH, x));
  return (kt_reduced){r, (int32_t)(kt_bits(shifted) - (uint32_t)KT_ROUNDER_BITS)};
}

/* 2^n, n in -126 .. 127; 0 for -127 and infinity for 128. */
KT_INLINE float kt_power_of_two(int32_t n) { return kt_float((uint32_t)(n + 127) << 23); }

/* Any x: results below 2^-126 are denormal or 0, those beyond the largest binary32 infinity; of NaN
 * NaN. */
KT_INLINE float kt_exp(float x) {
  x = KT_EXP_IS_ZERO > x ? KT_EXP_IS_ZERO : x;
  x = KT_EXP_IS_INFINITE < x ? KT_EXP_IS_INFINITE : x;
  const kt_reduced e = kt_reduce(x);
  const int32_t half = e.n / 2; /* 2^n itself may be no binary32 */
  const float p = kt_horner(kt_exp_taylor, KT_EXP_TERMS, e.r);
  return p * kt_power_of_two(half) * kt_power_of_two(e.n - half);
}

#endif
