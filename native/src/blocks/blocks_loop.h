/* blocks_loop.h - the pass, included by one file per level. See blocks.h.
 *
 * What is made small is sum(w (x - v)^2) of a block, with w the importance of the columns. With
 * codes q fixed, the best factors of a run follow from sums (least squares); with factors fixed,
 * the best codes are the nearest. A search begins at several factors and does both in turn; what is
 * stored are factors as the file has them (binary16, 6-bit integers), with the codes nearest to
 * what these make. */
#ifndef KT_BLOCKS_LOOP_H
#define KT_BLOCKS_LOOP_H

#include "../quantize/rounding.h"
#include "../simd/bits.h"
#include "../simd/unroll.h"
#include "blocks.h"

#include <math.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* everything with vectors is inlined */
#endif

#define INLINE static inline __attribute__((always_inline))
#define ALONE static __attribute__((noinline))

/* As many lanes as the level has in a vector: what is in one does not depend on the others. The 16
 * runs of a block of Q6_K are SIX vectors. */
#ifndef KT_BLOCKS_LANES
#define KT_BLOCKS_LANES 8
#endif
enum { LANES = KT_BLOCKS_LANES, SIX = 16 / LANES, RUN = 32, BATCH = 16 };
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));

/* ---- Vectors ------------------------------------------------------------------ */

INLINE vf all(float value) { return (vf){0} + value; }
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
#ifdef KT_BLOCKS_MIN /* the level's instructions, which say the same */
INLINE vf least(vf a, vf b) { return (vf)KT_BLOCKS_MIN(a, b); }
INLINE vf most(vf a, vf b) { return (vf)KT_BLOCKS_MAX(a, b); }
#else
INLINE vf least(vf a, vf b) { return pick(a < b, a, b); }
INLINE vf most(vf a, vf b) { return pick(a > b, a, b); }
#endif
INLINE vf within(vf x, float low, float high) { return least(most(x, all(low)), all(high)); }
INLINE vf size_of(vf x) { return (vf)((vi)x & 0x7fffffff); }
INLINE vf inverse(vf x) { return 1.0f / pick(x == 0.0f, all(INFINITY), x); } /* of 0: 0 */

/* The nearest integer, ties to even, of magnitudes below 2^22. */
INLINE vf whole(vf x) { return (x + 12582912.0f) - 12582912.0f; }

/* The nearest binary16, at most 65504; below 2^-14 a multiple of 2^-24. */
INLINE vf half_of(vf x) {
  const vi bits = (vi)x, magnitude = bits & 0x7fffffff;
  const vi normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fff;
  const vf small = whole((vf)magnitude * 0x1p24f) * 0x1p-24f;
  const vf found = pick((vf)magnitude < 0x1p-14f, small, least((vf)normal, all(65504.0f)));
  return (vf)((vi)found | (bits & (int32_t)0x80000000));
}

/* The bits of numbers that are binary16. */
INLINE vi half_codes(vf x) {
  const vi magnitude = (vi)x & 0x7fffffff;
  const vi small = (vi)((vf)magnitude * 0x1p24f + 12582912.0f) & 0xffff;
  const vi normal = (magnitude - (112 << 23)) >> 13;
  const vi code = (vi)pick((vf)magnitude < 0x1p-14f, (vf)small, (vf)normal);
  return code | (vi)((vu)x >> 16 & 0x8000u);
}

INLINE void put_half(uint8_t *at, int32_t code) {
  at[0] = (uint8_t)code;
  at[1] = (uint8_t)(code >> 8);
}

/* LANES runs of columns with their weights; column k of all runs is one vector. `stored`: the
 * columns one behind the other. */
typedef struct runs {
  vf x[RUN], w[RUN];
  const float *stored;
} runs;

/* ---- Codes of a run with one factor --------------------------------------------- */

/* The numbers that codes mean. Of codebooks, the levels and the middles between them. */
typedef enum book { LINEAR, IQ4, E2M1 } book;

static const float iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
static const float e2m1_levels[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

/* The level nearest to y. */
INLINE vf level(vf y, const book kind, float low, float high) {
  if (kind == LINEAR) return whole(within(y, low, high));
  const float *const levels = kind == IQ4 ? iq4_levels : e2m1_levels;
  const vf size = kind == IQ4 ? y : size_of(y);
  vf found = all(levels[0]);
  for (int n = 1; n < (kind == IQ4 ? 16 : 8); n++) {
    const vi above = size > 0.5f * (levels[n - 1] + levels[n]);
    found += (vf)((vi)all(levels[n] - levels[n - 1]) & above);
  }
  if (kind == IQ4) return found;
  return (vf)((vi)found | ((vi)y & (int32_t)0x80000000));
}

/* The code of a level. */
INLINE vi code_of(vf value, const book kind, float low) {
  if (kind == LINEAR) return __builtin_convertvector(value - low, vi);
  const float *const levels = kind == IQ4 ? iq4_levels : e2m1_levels;
  const vf size = kind == IQ4 ? value : size_of(value);
  vi found = {0};
  for (int n = 1; n < (kind == IQ4 ? 16 : 8); n++)
    found -= size > 0.5f * (levels[n - 1] + levels[n]);
  return kind == IQ4 ? found : found | ((vi)value >> 28 & 8);
}

/* The errors of three factors. */
INLINE void errors_of(const runs *run, const int length, const vf d[3], const book kind, float low,
                      float high, vf error[3]) {
  const vf over[3] = {inverse(d[0]), inverse(d[1]), inverse(d[2])};
  vf sum[3] = {{0}};
  for (int k = 0; k < length; k++) KT_UNROLL(3) for (int n = 0; n < 3; n++) {
      const vf off = run->x[k] - d[n] * level(run->x[k] * over[n], kind, low, high);
      sum[n] += run->w[k] * off * off;
    }
  for (int n = 0; n < 3; n++) error[n] = sum[n];
}

/* The best factor for the codes that are nearest with factor 1 / over; score: by how much it makes
 * the error smaller than that of zeros. */
INLINE vf fitted(const runs *run, const int length, vf over, const book kind, float low, float high,
                 vf *score) {
  vf xq = {0}, qq = {0};
  for (int k = 0; k < length; k++) {
    const vf q = level(run->x[k] * over, kind, low, high), wq = run->w[k] * q;
    xq += wq * run->x[k];
    qq += wq * q;
  }
  const vf d = xq * inverse(qq);
  *score = xq * d;
  return d;
}

/* The weight of the largest magnitude, with its sign. */
INLINE vf largest(const runs *run, const int length) {
  vf found = {0};
  for (int k = 0; k < length; k++)
    found = pick(size_of(run->x[k]) > size_of(found), run->x[k], found);
  return found;
}

/* How factors are searched: `count` with which the largest weight gets a number near the lowest or
 * the highest level, `step` apart and a third of them within it; the best one is fitted `again`. */
typedef struct search {
  int count, again;
  float step;
} search;

INLINE vf searched(const runs *run, const int length, const book kind, float low, float high,
                   const search how) {
  const vf peak = largest(run, length), over = inverse(peak);
  vf best = {0}, best_score = {0};
  for (int n = 0; n < 2 * how.count + how.again; n++) {
    const float end = n < how.count ? low : high, step = end < 0 ? -how.step : how.step;
    const float target = end + step * (float)(n % how.count - how.count / 3);
    const vf factor = n < 2 * how.count ? over * target : inverse(best);
    vf score;
    const vf d = fitted(run, length, factor, kind, low, high, &score);
    const vi better = score > best_score;
    best = pick(better, d, best);
    best_score = pick(better, score, best_score);
  }
  return best;
}

/* The better of some binary16 numbers next to a factor. */
INLINE vf halved(const runs *run, const int length, vf d, const book kind, float low, float high) {
  const vf near[3] = {half_of(d), half_of(d * 0.9995f), half_of(d * 1.0005f)};
  vf error[3], best = near[0];
  errors_of(run, length, near, kind, low, high, error);
  for (int n = 1; n < 3; n++) {
    const vi better = error[n] < error[0];
    best = pick(better, near[n], best);
    error[0] = pick(better, error[n], error[0]);
  }
  return best;
}

/* ---- Blocks of 32 with one factor ------------------------------------------------ */

INLINE void codes_of(const runs *run, vf d, const book kind, float low, float high, vi codes[RUN]) {
  const vf over = inverse(d);
  for (int k = 0; k < RUN; k++)
    codes[k] = code_of(level(run->x[k] * over, kind, low, high), kind, low);
}

/* 4 * count bytes of each lane, from vectors whose lowest 8 bits have one each. */
INLINE void put_bytes(const vi *codes, const int count, int lanes, uint8_t *out, const int stride) {
  int32_t words[RUN / 4][LANES];
  for (int n = 0; n < count; n++) {
    const vi *const c = codes + 4 * n;
    const vi word = (c[0] & 255) | (c[1] & 255) << 8 | (c[2] & 255) << 16 | c[3] << 24;
    memcpy(words[n], &word, sizeof word);
  }
  for (int lane = 0; lane < lanes; lane++, out += stride)
    for (int n = 0; n < count; n++) memcpy(out + 4 * n, &words[n][lane], 4);
}

/* 16 bytes of each lane: the first 16 codes in the low nibbles, the others in the high ones. */
INLINE void put_nibbles(const vi codes[RUN], int lanes, uint8_t *out, const int stride) {
  vi both[RUN / 2];
  for (int k = 0; k < RUN / 2; k++) both[k] = codes[k] | codes[k + RUN / 2] << 4;
  put_bytes(both, 4, lanes, out, stride);
}

INLINE void put_q4_0(const runs *run, vf d, int lanes, uint8_t *out) {
  vi codes[RUN];
  codes_of(run, d, LINEAR, -8, 7, codes);
  const vi halves = half_codes(d);
  for (int lane = 0; lane < lanes; lane++) put_half(out + 18 * lane, halves[lane]);
  put_nibbles(codes, lanes, out + 2, 18);
}

ALONE void q4_0_blocks(const runs *run, int lanes, uint8_t *out) {
  const vf d = searched(run, RUN, LINEAR, -8, 7, (search){9, 3, 0.25f});
  put_q4_0(run, halved(run, RUN, d, LINEAR, -8, 7), lanes, out);
}

#include "q4_0_plain.h"

ALONE void q8_0_blocks(const runs *run, int lanes, uint8_t *out) {
  vi codes[RUN];
  vf d = size_of(largest(run, RUN)) * (1.0f / 127.0f), score;
  d = pick(d > 0, fitted(run, RUN, inverse(d), LINEAR, -127, 127, &score), d);
  d = halved(run, RUN, d, LINEAR, -127, 127);
  codes_of(run, d, LINEAR, -127, 127, codes);
  for (int k = 0; k < RUN; k++) codes[k] -= 127;
  const vi halves = half_codes(d);
  for (int lane = 0; lane < lanes; lane++) put_half(out + 34 * lane, halves[lane]);
  put_bytes(codes, 8, lanes, out + 2, 34);
}

ALONE void iq4_nl_blocks(const runs *run, int lanes, uint8_t *out) {
  vi codes[RUN];
  const search how = {7, 3, 5.0f};
  const vf d = halved(run, RUN, searched(run, RUN, IQ4, -127, 113, how), IQ4, -127, 113);
  codes_of(run, d, IQ4, -127, 113, codes);
  const vi halves = half_codes(d);
  for (int lane = 0; lane < lanes; lane++) put_half(out + 18 * lane, halves[lane]);
  put_nibbles(codes, lanes, out + 2, 18);
}

/* A power of two: the one with which the largest weight is between 4 and 8, and its neighbours. */
ALONE void mxfp4_blocks(const runs *run, int lanes, uint8_t *out) {
  vi codes[RUN];
  const vf peak = size_of(largest(run, RUN));
  const vi first = ((vi)peak >> 23) - 2;
  vf d[3], error[3];
  for (int n = 0; n < 3; n++) {
    vi e = first + (n == 0 ? 0 : n == 1 ? 1 : -1);
    e = (vi)pick(e < 1, (vf)((vi){0} + 1), (vf)e);
    e = (vi)pick(e > 254, (vf)((vi){0} + 254), (vf)e);
    d[n] = (vf)(e << 23);
  }
  errors_of(run, RUN, d, E2M1, 0, 0, error);
  for (int n = 1; n < 3; n++) {
    const vi better = error[n] < error[0];
    d[0] = pick(better, d[n], d[0]);
    error[0] = pick(better, error[n], error[0]);
  }
  codes_of(run, d[0], E2M1, 0, 0, codes);
  const vi exponents = (vi)d[0] >> 23;
  for (int lane = 0; lane < lanes; lane++) out[17 * lane] = (uint8_t)exponents[lane];
  put_nibbles(codes, lanes, out + 1, 17);
}

/* ---- Blocks of 256: Q6_K ---------------------------------------------------------- */

/* 16 runs of 16 columns, whose factors are d times an integer. */
INLINE void q6_k_block(const runs *run, uint8_t *out) {
  vf factor[SIX], best_scale[SIX];
  float peak = 0, d_of_best = 0, best_sum = 0;
  for (int p = 0; p < SIX; p++) {
    factor[p] = searched(run + p, 16, LINEAR, -32, 31, (search){7, 3, 0.5f});
    for (int lane = 0; lane < LANES; lane++) {
      const float size = factor[p][lane] < 0 ? -factor[p][lane] : factor[p][lane];
      if (size > (peak < 0 ? -peak : peak)) peak = factor[p][lane];
    }
  }
  for (int n = 0; n < 4; n++) {
    static const float ends[4] = {-128, 127, -120, -110};
    const vf d = half_of(all(peak / ends[n])), over = inverse(d);
    vf scale[SIX];
    float sum = 0;
    for (int p = 0; p < SIX; p++) {
      const vf start = whole(within(factor[p] * over, -128, 127));
      const vf near[3] = {start, within(start - 1.0f, -128, 127), within(start + 1.0f, -128, 127)};
      const vf factors[3] = {d * near[0], d * near[1], d * near[2]};
      vf error[3];
      errors_of(run + p, 16, factors, LINEAR, -32, 31, error);
      scale[p] = start;
      for (int m = 1; m < 3; m++) {
        const vi better = error[m] < error[0];
        scale[p] = pick(better, near[m], scale[p]);
        error[0] = pick(better, error[m], error[0]);
      }
      for (int lane = 0; lane < LANES; lane++) sum += error[0][lane];
    }
    if (n == 0 || sum < best_sum) {
      best_sum = sum;
      memcpy(best_scale, scale, sizeof scale);
      d_of_best = d[0];
    }
  }
  uint8_t codes[256];
  for (int p = 0; p < SIX; p++) {
    const vf over = inverse(d_of_best * best_scale[p]);
    for (int k = 0; k < 16; k++) {
      const vf q = level(run[p].x[k] * over, LINEAR, -32, 31);
      for (int lane = 0; lane < LANES; lane++)
        codes[16 * (LANES * p + lane) + k] = (uint8_t)((int)q[lane] + 32);
    }
  }
  uint8_t *const low = out, *const high = out + 128;
  for (int h = 0; h < 2; h++)
    for (int l = 0; l < 32; l++) {
      const uint8_t *const q = codes + 128 * h + l;
      low[64 * h + l] = (uint8_t)((q[0] & 15) | (q[64] & 15) << 4);
      low[64 * h + 32 + l] = (uint8_t)((q[32] & 15) | (q[96] & 15) << 4);
      high[32 * h + l] = (uint8_t)(q[0] >> 4 | q[32] >> 4 << 2 | q[64] >> 4 << 4 | q[96] >> 4 << 6);
    }
  for (int j = 0; j < 16; j++) out[192 + j] = (uint8_t)(int)best_scale[j / LANES][j % LANES];
  put_half(out + 208, half_codes((vf){d_of_best})[0]);
}

/* ---- Blocks of 256 with minima: Q4_K and Q5_K ---------------------------------------- */

/* x is step * q - low, with low >= 0: the best pair for each run, before it is rounded. */
INLINE void searched_pair(const runs *run, float top, vf *step, vf *low) {
  vf least_x = {0}, most_x = run->x[0], sw = {0}, sx = {0}, sxx = {0};
  for (int k = 0; k < RUN; k++) {
    const vf x = run->x[k], wx = run->w[k] * x;
    least_x = least(least_x, x);
    most_x = most(most_x, x);
    sw += run->w[k];
    sx += wx;
    sxx += wx * x;
  }
  const vf span = inverse(most_x - least_x);
  vf best = sxx, best_step = {0}, best_low = {0};
  vf from = least_x;
  for (int n = 0; n < 20; n++) {
    /* 16 spans with the least weight at code 0, then what was best is fitted again. */
    vf over = span * (top + 0.8f - 0.125f * (float)n * (top > 15 ? 1.6f : 1.0f));
    if (n >= 16) {
      over = inverse(best_step);
      from = -best_low;
    }
    vf q1 = {0}, q2 = {0}, xq = {0};
    for (int k = 0; k < RUN; k++) {
      const vf q = whole(within((run->x[k] - from) * over, 0, top)), wq = run->w[k] * q;
      q1 += wq;
      q2 += wq * q;
      xq += wq * run->x[k];
    }
    const vf det = sw * q2 - q1 * q1, under = inverse(det);
    vf s = (sw * xq - sx * q1) * under, m = (q2 * sx - q1 * xq) * under;
    const vi single = (det <= 0.0f) | (m > 0.0f);
    s = pick(single, xq * inverse(q2), s);
    m = pick(single, all(0.0f), m);
    const vf error = sxx + s * s * q2 + m * m * sw + 2.0f * (s * m * q1 - s * xq - m * sx);
    const vi better = (error < best) & (s > 0.0f);
    best = pick(better, error, best);
    best_step = pick(better, s, best_step);
    best_low = pick(better, -m, best_low);
  }
  /* Runs that one number describes best, the least weight: below 0, without a step. */
  const vf mean = sx * inverse(sw);
  const vi flat = (mean < 0.0f) & (sxx - mean * sx < best);
  *step = pick(flat, all(0.0f), best_step);
  *low = pick(flat, -mean, best_low);
}

INLINE vf pair_error(const runs *run, vf step, vf low, float top) {
  const vf over = inverse(step);
  vf sum = {0};
  for (int k = 0; k < RUN; k++) {
    const vf q = whole(within((run->x[k] + low) * over, 0, top));
    const vf off = run->x[k] - (step * q - low);
    sum += run->w[k] * off * off;
  }
  return sum;
}

/* Factors of the blocks of 8 runs in a vector: d and dmin in binary16, and 6-bit integers of each
 * run. */
typedef struct pairs {
  vf d, dmin, scale, minimum, error;
} pairs;

/* One number for the 8 lanes of each block. */
enum { EIGHTS = LANES / 8 };
INLINE vf spread(const float *of_block) {
  vf found = {0};
  for (int lane = 0; lane < LANES; lane++) found[lane] = of_block[lane / 8];
  return found;
}

INLINE vf summed(vf x) {
  float sum[EIGHTS] = {0};
  for (int lane = 0; lane < LANES; lane++) sum[lane / 8] += x[lane];
  return spread(sum);
}

INLINE vf peak_of(vf x) {
  float peak[EIGHTS] = {0};
  for (int lane = 0; lane < LANES; lane++)
    peak[lane / 8] = x[lane] > peak[lane / 8] ? x[lane] : peak[lane / 8];
  return spread(peak);
}

/* The integers of each run that suit d and dmin best, of those next to `scale` and `minimum`. */
INLINE pairs rounded_pairs(const runs *run, float top, vf d, vf dmin, vf scale, vf minimum) {
  const vf s0 = within(whole(within(scale, 0, 63)), 0, 63);
  const vf m0 = within(whole(within(minimum, 0, 63)), 0, 63);
  pairs found = {d, dmin, s0, m0, pair_error(run, d * s0, dmin * m0, top)};
  for (int n = 0; n < 8; n++) {
    static const float steps[8][2] = {{-1, 0},  {1, 0}, {0, -1}, {0, 1},
                                      {-1, -1}, {1, 1}, {-1, 1}, {1, -1}};
    const vf s = within(s0 + steps[n][0], 0, 63), m = within(m0 + steps[n][1], 0, 63);
    const vf error = pair_error(run, d * s, dmin * m, top);
    const vi better = error < found.error;
    found.scale = pick(better, s, found.scale);
    found.minimum = pick(better, m, found.minimum);
    found.error = pick(better, error, found.error);
  }
  return found;
}

INLINE void keep_better(pairs *best, pairs other) {
  const vi better = summed(other.error) < summed(best->error);
  best->d = pick(better, other.d, best->d);
  best->dmin = pick(better, other.dmin, best->dmin);
  best->scale = pick(better, other.scale, best->scale);
  best->minimum = pick(better, other.minimum, best->minimum);
  best->error = pick(better, other.error, best->error);
}

/* d and dmin by least squares over a block, with integers and codes as they are. */
INLINE pairs fitted_pairs(const runs *run, float top, const pairs *now) {
  const vf step = now->d * now->scale, low = now->dmin * now->minimum, over = inverse(step);
  vf q1 = {0}, q2 = {0}, xq = {0}, sw = {0}, sx = {0};
  for (int k = 0; k < RUN; k++) {
    const vf q = whole(within((run->x[k] + low) * over, 0, top)), wq = run->w[k] * q;
    q1 += wq;
    q2 += wq * q;
    xq += wq * run->x[k];
    sw += run->w[k];
    sx += run->w[k] * run->x[k];
  }
  const vf s = now->scale, m = now->minimum;
  const vf aa = summed(s * s * q2), ab = summed(s * m * q1), bb = summed(m * m * sw);
  const vf xa = summed(s * xq), xb = summed(m * sx);
  const vf det = aa * bb - ab * ab, under = inverse(det);
  const vf both_d = (xa * bb - xb * ab) * under, both_m = (xa * ab - xb * aa) * under;
  const vi single = (det <= 1e-6f * aa * bb) | (both_m < 0.0f) | (both_d <= 0.0f);
  const vf d = half_of(pick(single, now->d, both_d));
  const vf dmin = half_of(pick(single, now->dmin, both_m));
  return rounded_pairs(run, top, d, dmin, step * inverse(d), low * inverse(dmin));
}

INLINE void q45_k_blocks(const runs *run, int lanes, uint8_t *out, const int bits) {
  const float top = bits == 4 ? 15.0f : 31.0f;
  vf step, low;
  searched_pair(run, top, &step, &low);
  const vf peak = peak_of(step), least_low = peak_of(low);
  pairs best = {0};
  for (int n = 0; n < 2; n++) {
    const vf d = half_of(peak * (n ? 1.0f / 61.0f : 1.0f / 63.0f));
    const vf dmin = half_of(least_low * (1.0f / 63.0f));
    const pairs found = rounded_pairs(run, top, d, dmin, step * inverse(d), low * inverse(dmin));
    if (n)
      keep_better(&best, found);
    else
      best = found;
  }
  for (int n = 0; n < 2; n++) keep_better(&best, fitted_pairs(run, top, &best));
  /* Steps of small runs can be rounded to 0, beside a minimum that is none of theirs. */
  const vi worse = best.error > pair_error(run, all(0.0f), all(0.0f), top);
  best.scale = pick(worse, all(0.0f), best.scale);
  best.minimum = pick(worse, all(0.0f), best.minimum);
  int32_t codes[RUN][LANES];
  const vf down = best.dmin * best.minimum, over = inverse(best.d * best.scale);
  for (int k = 0; k < RUN; k++) {
    const vi code = __builtin_convertvector(whole(within((run->x[k] + down) * over, 0, top)), vi);
    memcpy(codes[k], &code, sizeof code);
  }
  const vi halves[2] = {half_codes(best.d), half_codes(best.dmin)};
  for (int first = 0; first < lanes; first += 8) {
    put_half(out, halves[0][first]);
    put_half(out + 2, halves[1][first]);
    uint8_t *const s = out + 4;
    for (int j = 0; j < 4; j++) {
      const int scale = (int)best.scale[first + j], minimum = (int)best.minimum[first + j];
      const int high_scale = (int)best.scale[first + j + 4];
      const int high_minimum = (int)best.minimum[first + j + 4];
      s[j] = (uint8_t)(scale | high_scale >> 4 << 6);
      s[j + 4] = (uint8_t)(minimum | high_minimum >> 4 << 6);
      s[j + 8] = (uint8_t)((high_scale & 15) | (high_minimum & 15) << 4);
    }
    uint8_t *const qs = out + (bits == 4 ? 16 : 48);
    for (int j = 0; j < 8; j += 2)
      for (int k = 0; k < RUN; k++)
        qs[16 * j + k] =
            (uint8_t)((codes[k][first + j] & 15) | (codes[k][first + j + 1] & 15) << 4);
    for (int k = 0; bits == 5 && k < RUN; k++) {
      int high = 0;
      for (int j = 0; j < 8; j++) high |= codes[k][first + j] >> 4 << j;
      out[16 + k] = (uint8_t)high;
    }
    out += bits == 4 ? 144 : 176;
  }
}

ALONE void q4_k_blocks(const runs *run, int lanes, uint8_t *out) {
  q45_k_blocks(run, lanes, out, 4);
}

ALONE void q5_k_blocks(const runs *run, int lanes, uint8_t *out) {
  q45_k_blocks(run, lanes, out, 5);
}

ALONE void q6_k_blocks(const runs *run, int lanes, uint8_t *out) {
  (void)lanes; /* one block */
  q6_k_block(run, out);
}

/* ---- Rows ------------------------------------------------------------------------- */

typedef void blocks_fn(const runs *run, int lanes, uint8_t *out);

typedef float one_lane __attribute__((may_alias));

/* `lanes` runs of `length` columns from x on, as many as a vector has; other lanes are zeros. */
INLINE void load_columns(vf *to, const float *x, int lanes, const int length) {
  float padded[LANES * RUN];
  if (lanes < LANES) {
    memset(padded, 0, sizeof padded);
    if (lanes > 0) memcpy(padded, x, (size_t)lanes * (size_t)length * sizeof *x);
    x = padded;
  }
#ifdef KT_BLOCKS_TRANSPOSED
  for (int k = 0; k < length; k += LANES) KT_BLOCKS_TRANSPOSED(to + k, x + k, length);
#else
  one_lane(*const values)[LANES] = (one_lane(*)[LANES])to;
  for (int lane = 0; lane < LANES; lane++)
    for (int k = 0; k < length; k++) values[k][lane] = x[length * lane + k];
#endif
}

/* All columns count 1. */
INLINE void fill_importance(runs *run, const int vectors, const int length) {
  for (int p = 0; p < vectors; p++)
    for (int k = 0; k < length; k++) run[p].w[k] = all(1.0f);
}

/* The importance of the columns of a batch, with `of_block` runs in a block. Only
 * ratios within a block matter: a power of two brings its largest to between 1 and 2, so that no
 * sum is lost to small or large units. Columns that do not count have LEAST of it, so that codes
 * are near to them as well. */
#define LEAST 0x1p-30f
INLINE void load_importance(runs *run, const float *importance, int lanes, const int vectors,
                            const int length, const int of_block) {
  float peak[BATCH] = {0};
  fill_importance(run, vectors, length);
  for (int r = 0; r < lanes; r++)
    for (int k = 0; k < length; k++) {
      const float found = importance[r * length + k];
      if (found > peak[r / of_block]) peak[r / of_block] = found;
    }
  for (int r = 0; r < lanes; r++) {
    const float most = peak[r / of_block];
    if (most == 0.0f) continue;
    const float factor = kt_float((254u - (kt_bits(most) >> 23)) << 23);
    one_lane(*const values)[LANES] = (one_lane(*)[LANES])run[r / LANES].w;
    for (int k = 0; k < length; k++) {
      const float found = importance[r * length + k] * factor;
      values[k][r % LANES] = found > LEAST ? found : LEAST;
    }
  }
}

/* The largest magnitude whose factors binary16 has. */
static float limit_of(int32_t dtype) {
  switch (dtype) {
  case KT_MXFP4: return 3.402823466e38f;
  case KT_Q4_0: return 65504.0f * 7;
  case KT_IQ4_NL: return 65504.0f * 113;
  default: return 65504.0f * 64;
  }
}

/* Bits of the largest magnitude. cols % 32 == 0. */
INLINE uint32_t peak_bits(const float *x, int64_t cols) {
#ifdef KT_BLOCKS_MAX_BITS
  vi peak[32 / LANES] = {{0}};
  for (int64_t k = 0; k < cols; k += 32)
    for (int n = 0; n < 32 / LANES; n++) {
      vi bits;
      memcpy(&bits, x + k + n * LANES, sizeof bits);
      peak[n] = (vi)KT_BLOCKS_MAX_BITS(peak[n], bits & 0x7fffffff);
    }
  int32_t found = 0;
  for (int n = 0; n < 32; n++) {
    const int32_t one = peak[n / LANES][n % LANES];
    found = one > found ? one : found;
  }
  return (uint32_t)found;
#else
  return kt_row_max_bits(x, cols);
#endif
}

static kt_status blocks_any(const kt_blocks_job *job) {
  blocks_fn *encode = mxfp4_blocks;
  int length = RUN, vectors = 1;
  switch (job->dtype) {
  case KT_Q4_0:
    if (job->importance)
      encode = q4_0_blocks;
    else
      encode = q4_0_plain_blocks, vectors = 2;
    break;
  case KT_Q8_0: encode = q8_0_blocks; break;
  case KT_IQ4_NL: encode = iq4_nl_blocks; break;
  case KT_Q4_K: encode = q4_k_blocks; break;
  case KT_Q5_K: encode = q5_k_blocks; break;
  case KT_Q6_K: encode = q6_k_blocks, length = 16, vectors = SIX; break;
  default: break;
  }
  const int64_t rows = job->source->rows, cols = job->source->cols;
  const int64_t stride = kt_scratch_stride(cols), batch = (int64_t)length * LANES * vectors;
  const int64_t row_bytes = cols / job->unit_cols * job->unit_bytes;
  const int64_t at_once = job->importance ? KT_BLOCKS_ROWS : 1; /* else they leave the cache */
  const float limit = limit_of(job->dtype);
  runs run[2];
  if (!job->importance) fill_importance(run, vectors, length);
  for (int64_t n = 0; n < rows; n += at_once) {
    const int64_t count = rows - n < at_once ? rows - n : at_once;
    job->decode(job->source, n, count, job->scratch, stride);
    for (int64_t r = 0; r < count; r++) {
      const uint32_t peak = peak_bits(job->scratch + r * stride, cols);
      if (peak >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
      if (kt_float(peak) > limit) return KT_ERR_SCALE;
    }
    for (int64_t k = 0; k < cols; k += batch) { /* importance is loaded once for these rows */
      const int lanes = (int)((cols - k < batch ? cols - k : batch) / length);
      if (job->importance)
        load_importance(run, job->importance + k, lanes, vectors, length, job->unit_cols / length);
      uint8_t *const out = job->blocks + n * row_bytes + k / job->unit_cols * job->unit_bytes;
      for (int64_t r = 0; r < count; r++) {
        const float *const x = job->scratch + r * stride + k;
        for (int p = 0; p < vectors; p++) {
          run[p].stored = x + p * LANES * length;
          load_columns(run[p].x, run[p].stored, lanes - p * LANES, length);
        }
        encode(run, lanes, out + r * row_bytes);
      }
    }
  }
  return KT_OK;
}

#endif
