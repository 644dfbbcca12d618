/* q4_0_plain.h - Q4_0 where all columns count the same, a part of blocks_loop.h.
 *
 * A block's largest weight becomes 511 or -511, the others integers next to that, and a factor is
 * tried by what it makes of these: codes, sum(m q) and sum(q q), all exact (docs/gguf.md has the
 * rule). Two columns share a lane of 32 bits; sums have no order, so that a level may form them as
 * it likes. The codes that are stored come from the weights themselves, row by row: a vector holds
 * columns of one block, whose bytes then lie side by side. */
#ifndef KT_BLOCKS_Q4_0_PLAIN_H
#define KT_BLOCKS_Q4_0_PLAIN_H

enum {
  PLAIN_MOST = 511,  /* what the largest weight becomes */
  PLAIN_BOUND = 544, /* of inverse factors: 8.49 * 2^15 / 511, whose codes are at least -8 */
  PAIRS = RUN / 2,
  HALF = RUN / 2 / LANES /* vectors of half a block */
};

#ifndef KT_BLOCKS_SUMS
/* Sums of m q and q q over both integers of each lane; q: m * inverse / 2^15, to the nearest
 * integer, halves up, 7 at most. Integers have fewer than 2^24 in all of this, as binary32 has
 * them exactly; 2^-16 takes halves up, and no other fraction. */
INLINE void plain_sums(const vi pairs[PAIRS], vi inverse, vi *product, vi *square) {
  const vf over = __builtin_convertvector(inverse, vf) * 0x1p-15f;
  vf xq = {0}, qq = {0};
  for (int k = 0; k < PAIRS; k++)
    for (int n = 0; n < 2; n++) {
      const vi integers = n ? pairs[k] >> 16 : (vi)((vu)pairs[k] << 16) >> 16;
      const vf m = __builtin_convertvector(integers, vf);
      const vf q = least(whole(m * over + 0x1p-16f), all(7.0f));
      xq += m * q;
      qq += q * q;
    }
  *product = __builtin_convertvector(xq, vi);
  *square = __builtin_convertvector(qq, vi);
}
#define KT_BLOCKS_SUMS plain_sums
#endif

#ifndef KT_BLOCKS_BYTES
INLINE void lowest_bytes(vi from, uint8_t *to) {
  for (int lane = 0; lane < LANES; lane++) to[lane] = (uint8_t)from[lane];
}
#define KT_BLOCKS_BYTES lowest_bytes
#endif

/* A factor's sums, in units of the integers. */
typedef struct plain_factor {
  vf product, square;
} plain_factor;

/* Keeps the factor with the larger product^2 / square, by which it lowers the error. */
INLINE void try_factor(const vi pairs[PAIRS], vi inverse, plain_factor *best) {
  vi product, square;
  KT_BLOCKS_SUMS(pairs, inverse, &product, &square);
  const vf p = __builtin_convertvector(product, vf), s = __builtin_convertvector(square, vf);
  const vi better = p * p * best->square > best->product * best->product * s;
  best->product = pick(better, p, best->product);
  best->square = pick(better, s, best->square);
}

INLINE vi pairs_of(vf a, vf b, vf factor) {
  const vi low = (vi)(a * factor + 12582912.0f), high = (vi)(b * factor + 12582912.0f);
  return (low & 0xffff) | (vi)((vu)high << 16);
}

/* Weights of LANES blocks as integers, and what 1 is. */
INLINE vf integers_of(const vf x[RUN], vi pairs[PAIRS]) {
  vf low[4], high[4];
  for (int k = 0; k < RUN; k++) {
    low[k & 3] = k < 4 ? x[k] : least(low[k & 3], x[k]);
    high[k & 3] = k < 4 ? x[k] : most(high[k & 3], x[k]);
  }
  const vf lowest = least(least(low[0], low[1]), least(low[2], low[3]));
  const vf highest = most(most(high[0], high[1]), most(high[2], high[3]));
  const vf largest = pick(highest < -lowest, lowest, highest);
  /* Factors of smaller blocks are 0 in binary16. */
  const vf peak = pick(size_of(largest) < 0x1p-30f, all(0.0f), largest);
  const vf factor = inverse(peak) * (float)PLAIN_MOST;
  for (int k = 0; k < PAIRS; k++) pairs[k] = pairs_of(x[2 * k], x[2 * k + 1], factor);
  return peak * (1.0f / PLAIN_MOST);
}

/* The inverse factor that suits the codes of `best` best. */
INLINE vi fitted_inverse(const plain_factor *best) {
  const vf found = 32768.0f * best->square * inverse(best->product);
  const vf inside = within(found, -PLAIN_BOUND, PLAIN_BOUND);
  return __builtin_convertvector(whole(inside), vi);
}

/* The codes of a block, the first half of its columns in the low nibbles. */
INLINE void put_plain(const float *x, float over, uint8_t *out) {
  const vf zero = all(12582912.0f); /* so that the lowest bits are those of the code */
  for (int n = 0; n < HALF; n++) {
    vf q[2];
    for (int h = 0; h < 2; h++) {
      memcpy(&q[h], x + LANES * (n + h * HALF), sizeof(vf));
      q[h] = least(most(q[h] * over + (zero + 8.0f), zero), zero + 15.0f);
    }
    KT_BLOCKS_BYTES((vi)q[0] | (vi)((vu)(vi)q[1] << 4), out + LANES * n);
  }
}

/* `sets` of LANES blocks in turns: while one waits for a quotient, the other one computes. */
INLINE void plain_sets(const runs *run, const int sets, int lanes, uint8_t *out) {
  static const int16_t inverses[] = {-468, -513, -544, 404, 449, 494}; /* target * 2^15 / 511 */
  vi pairs[2][PAIRS], halves[2];
  vf one[2], over[2];
  plain_factor best[2];
  for (int s = 0; s < sets; s++) {
    one[s] = integers_of(run[s].x, pairs[s]);
    best[s] = (plain_factor){all(0.0f), all(1.0f)};
  }
  for (int n = 0; n < (int)(sizeof inverses / sizeof *inverses); n++)
    for (int s = 0; s < sets; s++) try_factor(pairs[s], (vi){0} + inverses[n], &best[s]);
  for (int s = 0; s < sets; s++) try_factor(pairs[s], fitted_inverse(&best[s]), &best[s]);
  for (int s = 0; s < sets; s++) {
    const vf d = half_of(best[s].product * inverse(best[s].square) * one[s]);
    halves[s] = half_codes(d);
    over[s] = inverse(d);
  }
  const float *x = run->stored;
  for (int n = 0; n < lanes; n++, x += RUN, out += 18) {
    put_half(out, halves[n / LANES][n % LANES]);
    put_plain(x, over[n / LANES][n % LANES], out + 2);
  }
}

ALONE void q4_0_plain_blocks(const runs *run, int lanes, uint8_t *out) {
  if (lanes > LANES)
    plain_sets(run, 2, lanes, out);
  else
    plain_sets(run, 1, lanes, out);
}

#endif
