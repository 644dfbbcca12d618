/* encoded_floats.h - the comparison of codes that are floating-point numbers, included by
 * encoded_loop.h: E4M3 (FP8, MXFP8) and E2M1 (MXFP4, NVFP4), by their definitions. */
#ifndef KT_AUDIT_ENCODED_FLOATS_H
#define KT_AUDIT_ENCODED_FLOATS_H

/* Bits of the magnitude of a place, or of the middle between it and the next one (halves 1). */
INLINE int32_t magnitude_bits(const float_kind n, int32_t place, const int halves) {
  const uint32_t small = bits_of(((float)place + 0.5f * (float)halves) * n.least);
  const uint32_t fields = ((uint32_t)place << n.shift) + ((uint32_t)n.bias << 23);
  const uint32_t normal = fields + ((uint32_t)halves << (n.shift - 1));
  return (int32_t)choose(place < n.normal, small, normal);
}

/* Whether a place is that of the magnitude nearest to q >= 0, in the order of bits, which is
 * theirs: of the middle between two places, the even one has it. Beyond the largest magnitude all
 * have its place. No place has a NaN, whose sign depends on the CPU, or what is below 0, as under
 * a damaged scale. */
INLINE int is_nearest(const float_kind n, float q, int32_t place) {
  const int32_t bits = (int32_t)bits_of(q), odd = place & 1;
  const int32_t first = (int32_t)choose(place == 0, 0, (uint32_t)magnitude_bits(n, place - 1, 1));
  const int32_t last = magnitude_bits(n, place, 1) - odd;
  const int32_t end = (int32_t)choose(place == n.top, 0x7f800000u, (uint32_t)last);
  return (bits >= first + odd) & (bits <= end) & (place <= n.top);
}

/* The reciprocal of the distance between magnitudes from this one on, a power of two. */
INLINE float per_step(const float_kind n, int32_t here) {
  const int32_t power = (here & 0x7f800000) - ((23 - n.shift) << 23);
  const int32_t smallest = (int32_t)bits_of(n.least);
  return from_bits((254u << 23) - (uint32_t)(power > smallest ? power : smallest));
}

/* Adds `span` columns (LANES or twice as many) that share a scale, by `power` one that is a power
 * of two, of which a product with the reciprocal is the quotient; their largest magnitude.
 * A level may have its own, with the same sums. */
#ifndef KT_ENCODED_OWN_FLOATS
typedef row_sums float_sums;
typedef int32_t float_most;

INLINE void begin_floats(float_sums *sum) { *sum = (float_sums){{0}, {0}, {0}, {0}, {0}, {0}}; }

INLINE void end_floats(const float_sums *sum, row_sums *row) { *row = *sum; }

INLINE float_most compare_floats(const float_kind n, const float *restrict w,
                                 const uint8_t *restrict codes, float divisor, const int power,
                                 const int span, float_sums *restrict sum) {
  float error[PIECE], value[PIECE], steps[PIECE], q[PIECE];
  int32_t place[PIECE], sign[PIECE];
  int32_t zero[PIECE], other[PIECE], most = 0;
  const float inverse = 1.0f / divisor;
  for (int c = 0; c < span; c++) {
    place[c] = codes[c] & ((1 << n.sign) - 1);
    sign[c] = codes[c] >> n.sign;
  }
  for (int c = 0; c < span; c++) {
    const int32_t bits = (int32_t)(bits_of(w[c]) & 0x7fffffffu);
    most = bits > most ? bits : most;
    q[c] = power ? from_bits((uint32_t)bits) * inverse : from_bits((uint32_t)bits) / divisor;
  }
  for (int c = 0; c < span; c++) {
    const int32_t here = magnitude_bits(n, place[c], 0);
    const int32_t opposite = (int32_t)(bits_of(w[c]) ^ (uint32_t)sign[c] << 31) < 0;
    const int32_t some = q[c] != 0.0f; /* zero may have either sign */
    other[c] = (is_nearest(n, q[c], place[c]) ^ 1) | (opposite & some);
    zero[c] = place[c] == 0;
    steps[c] = fabsf(q[c] - from_bits((uint32_t)here)) * per_step(n, here);
    value[c] = from_bits(bits_of(from_bits((uint32_t)here) * divisor) | (uint32_t)sign[c] << 31);
    error[c] = w[c] - value[c];
  }
  for (int side = 0; side < span; side += LANES)
    for (int i = 0; i < LANES; i++) {
      sum->source[i] += w[side + i] * w[side + i];
      sum->error[i] += error[side + i] * error[side + i];
      sum->value[i] += value[side + i] * value[side + i];
      sum->most_steps[i] = larger(steps[side + i], sum->most_steps[i]);
      sum->zeros[i] += zero[side + i];
      sum->others[i] += other[side + i];
    }
  return most;
}

/* What a level knows of codes, where one is `known` steps off already. */
typedef float float_bounds;

INLINE float_bounds float_bounds_of(float known) { return known; }

/* compare_floats */
INLINE float_most compare_group(const float_kind n, const float *w, const uint8_t *codes,
                                float divisor, const int power, const int span,
                                const float_bounds *bounds, float_sums *sum) {
  (void)bounds;
  return compare_floats(n, w, codes, divisor, power, span, sum);
}

INLINE int32_t bits_of_most(float_most most) { return most; }

INLINE void bits_of_all(const float_most *most, int64_t groups, int32_t *bits) {
  for (int64_t g = 0; g < groups; g++) bits[g] = most[g];
}
#endif

/* ---- Scales ------------------------------------------------------------------ */

INLINE uint32_t stored_scale(const kt_encoded_job *job, const int kind, int64_t at) {
  if (kind != KT_ENCODE_FP8) return ((const uint8_t *)job->scales)[at];
  uint32_t bits;
  memcpy(&bits, (const uint8_t *)job->scales + 4 * at, sizeof bits);
  return bits;
}

/* What weights of a group are divided by. */
INLINE float divisor_of(const kt_encoded_job *job, const int kind, int64_t at) {
  const uint32_t code = stored_scale(job, kind, at);
  switch (kind) {
  case KT_ENCODE_FP8: return from_bits(code);
  case KT_ENCODE_NVFP4: return f8_value((uint8_t)code) / job->tensor_scale;
  default: return from_bits(choose(code == 0, 1u << 22, code << 23)); /* 255: infinity */
  }
}

/* The exponent of MX scales: that of the largest magnitude, from 7/4 of a power of two on that of
 * the next one, less that of the largest level. */
INLINE uint32_t power_of_rule(float amax, int32_t top) {
  const int32_t exponent = (int32_t)(bits_of(amax) >> 23), fraction = bits_of(amax) & 0x7fffff;
  const int32_t code = exponent + (fraction >= 0x600000) - top;
  const int32_t most = code < 254 ? code : 254;
  return choose((exponent == 0) | (code < 0), 0, (uint32_t)most);
}

INLINE int is_rule_scale(const kt_encoded_job *job, const int kind, float amax, int64_t at) {
  const uint32_t code = stored_scale(job, kind, at);
  switch (kind) {
  case KT_ENCODE_FP8: return code == bits_of((amax > 1e-30f ? amax : 1e-30f) / 448.0f);
  case KT_ENCODE_MXFP4: return code == power_of_rule(amax, 2);
  case KT_ENCODE_MXFP8: return code == power_of_rule(amax, 8);
  default: break;
  }
  const float wanted = job->tensor_scale * (amax / 6.0f);
  const int nothing = is_nearest(e4m3, wanted, 0); /* 1/8 where it would be 0 */
  const int is_eighth = code == 0x20, is_next = is_nearest(e4m3, wanted, (int32_t)code);
  return (nothing & is_eighth) | ((nothing ^ 1) & is_next);
}

INLINE void finish_floats(const kt_encoded_job *job, const int kind, int64_t at, group_state *group,
                          kt_encoded_audit *found) {
  found->other_scales += !is_rule_scale(job, kind, from_bits((uint32_t)group->most), at);
  group->most = 0;
}

/* The scales of some groups of a row, whose largest magnitudes have these bits. */
INLINE void finish_groups(const kt_encoded_job *job, const int kind, int64_t at, int64_t groups,
                          const int32_t *most, kt_encoded_audit *found) {
  int32_t others = 0;
  for (int64_t g = 0; g < groups; g++)
    others += is_rule_scale(job, kind, from_bits((uint32_t)most[g]), at + g) ^ 1;
  found->other_scales += others;
}

/* ---- Matrices ---------------------------------------------------------------- */

/* The codes of some columns, in a byte each. */
INLINE const uint8_t *float_codes(const kt_encoded_job *job, int64_t row, int64_t col, int64_t cols,
                                  const int nibbles, uint8_t *room) {
  const int64_t at = row * job->source->cols + col;
  if (!nibbles) return job->codes + at;
  halves_of_bytes(job->codes + at / 2, cols, room);
  return room;
}

INLINE void add_counts(const row_sums *sum, sums *all) {
  for (int i = 0; i < LANES; i++) {
    all->zeros += sum->zeros[i];
    all->others += sum->others[i];
  }
}

enum { TALL = 128 }; /* rows of a block of FP8 */

/* Which scale of a line of them a column has; `fixed`, `tall`: of audit_floats. */
INLINE int64_t group_at(int64_t col, const int64_t fixed, const int tall) {
  return fixed ? col / fixed : tall ? col / TALL : 0;
}

/* What codes of a row stand for, whose first scale is `line`. */
static __attribute__((noinline)) void float_values(const kt_encoded_job *job, const float_kind n,
                                                   const uint8_t *codes, int64_t line, int64_t col,
                                                   int64_t cols, const int64_t fixed,
                                                   const int tall, float *values) {
  for (int64_t c = 0; c < cols; c++) {
    const float divisor = divisor_of(job, job->kind, line + group_at(col + c, fixed, tall));
    const uint32_t sign = (uint32_t)codes[c] >> n.sign << 31;
    const int32_t here = magnitude_bits(n, codes[c] & ((1 << n.sign) - 1), 0);
    values[c] = from_bits(bits_of(from_bits((uint32_t)here) * divisor) | sign);
  }
}

/* Adds columns of a row that begin with group `at`, whose groups have `fixed` columns. */
INLINE void compare_groups(const kt_encoded_job *job, const float_kind n, const int kind,
                           const int64_t fixed, int64_t at, const float *w, const uint8_t *codes,
                           int64_t cols, float known, float_sums *sum, kt_encoded_audit *found) {
  float divisor[KT_AUDIT_SUMMED / LANES];
  float_most most[KT_AUDIT_SUMMED / LANES];
  int32_t bits[KT_AUDIT_SUMMED / LANES];
  const int64_t groups = cols / fixed;
  const float_bounds bounds = float_bounds_of(known);
  for (int64_t g = 0; g < groups; g++) divisor[g] = divisor_of(job, kind, at + g);
  for (int64_t g = 0; g < groups; g++)
    most[g] = compare_group(n, w + g * fixed, codes + g * fixed, divisor[g],
                            kind != KT_ENCODE_NVFP4, (int)fixed, &bounds, sum);
  bits_of_all(most, groups, bits);
  finish_groups(job, kind, at, groups, bits, found);
}

/* Adds columns of a row that share a scale. */
INLINE void compare_columns(const float_kind n, const float *w, const uint8_t *codes, int64_t cols,
                            float divisor, group_state *group, float_sums *sum) {
  for (int64_t c = 0; c < cols; c += PIECE) {
    const int32_t most = bits_of_most(compare_floats(n, w + c, codes + c, divisor, 0, PIECE, sum));
    group->most = most > group->most ? most : group->most;
  }
}

/* `fixed`: the columns of a group, if it is a constant, else 0: a row's, or TALL of `tall` rows. */
INLINE void audit_floats(const kt_encoded_job *job, const float_kind n, const int kind,
                         const int64_t fixed, const int tall, kt_encoded_audit *found) {
  const kt_matrix *const m = job->source;
  const int across = is_across(m), nibbles = n.sign == 3;
  const int64_t at_once = across ? 2 * KT_AUDIT_ROWS : 1, high = tall ? TALL : at_once;
  const int64_t block = across ? KT_AUDIT_GATHERED : KT_AUDIT_SUMMED;
  group_state of_row[2 * KT_AUDIT_ROWS] = {{0}}, of_block[KT_AUDIT_SUMMED / TALL] = {{0}};
  sums all = {{0}, {0}, {0}, 0, 0, 0};
  for (int64_t first = 0; first < m->rows; first += high)
    for (int64_t col = 0, width; col < m->cols; col += width) {
      const int64_t end = least(first + high, m->rows);
      width = least(block, m->cols - col);
      for (int64_t row = first; row < end; row += at_once) {
        uint8_t room[ROOM_BYTES];
        const stored s = stored_from(m, row, col, width, room);
        for (int64_t r = 0; r < at_once; r++) {
          float w[KT_AUDIT_SUMMED];
          uint8_t unpacked[KT_AUDIT_SUMMED];
          source_values(m, stored_on(s, r), row + r, col, width, w);
          const uint8_t *const codes = float_codes(job, row + r, col, width, nibbles, unpacked);
          row_sums sum;
          float_sums running;
          begin_floats(&running);
          const int64_t line = (tall ? (row + r) / TALL : row + r) * job->groups;
          if (fixed) {
            compare_groups(job, n, kind, fixed, line + col / fixed, w, codes, width, all.known,
                           &running, found);
          } else if (tall) {
            for (int64_t c = 0; c < width; c += TALL)
              compare_columns(n, w + c, codes + c, least(TALL, width - c),
                              divisor_of(job, kind, line + (col + c) / TALL), of_block + c / TALL,
                              &running);
          } else {
            compare_columns(n, w, codes, width, divisor_of(job, kind, line), of_row + r, &running);
            if (col + width == m->cols) finish_floats(job, kind, line, of_row + r, found);
          }
          end_floats(&running, &sum);
          add_counts(&sum, &all);
          if (are_usual(&sum)) {
            add_sums(&sum, &all);
          } else {
            float values[KT_AUDIT_SUMMED];
            float_values(job, n, codes, line, col, width, fixed, tall, values);
            add_extreme(w, values, width, &all);
          }
          add_steps(&sum, &all);
        }
      }
      for (int64_t c = 0; tall && c < width; c += TALL)
        finish_floats(job, kind, first / TALL * job->groups + (col + c) / TALL, of_block + c / TALL,
                      found);
    }
  found->max_steps = (double)all.known;
  found->squared_source += total(all.source);
  found->squared_error += total(all.error);
  found->squared_value += total(all.value);
  found->zeros += all.zeros;
  found->other_codes += all.others;
}

/* bf16: the nearest to a weight, of zeros either. */
static __attribute__((noinline)) void audit_bf16(const kt_encoded_job *job,
                                                 kt_encoded_audit *found) {
  const kt_matrix *const m = job->source;
  const int across = is_across(m);
  const int64_t at_once = across ? 2 * KT_AUDIT_ROWS : 1;
  const int64_t block = across ? KT_AUDIT_GATHERED : KT_AUDIT_SUMMED;
  sums all = {{0}, {0}, {0}, 0, 0, 0};
  for (int64_t row = 0; row < m->rows; row += at_once)
    for (int64_t col = 0, width; col < m->cols; col += width) {
      uint8_t room[ROOM_BYTES];
      width = least(block, m->cols - col);
      const stored s = stored_from(m, row, col, width, room);
      for (int64_t r = 0; r < at_once; r++) {
        float w[KT_AUDIT_SUMMED];
        row_sums sum = {{0}, {0}, {0}, {0}, {0}, {0}};
        int32_t zeros = 0, others = 0;
        source_values(m, stored_on(s, r), row + r, col, width, w);
        const uint8_t *const codes = job->codes + 2 * ((row + r) * m->cols + col);
        for (int64_t c = 0; c < width; c += LANES)
          for (int i = 0; i < LANES; i++) {
            const float x = w[c + i],
                        value = from_bits((uint32_t)half_at(codes + 2 * (c + i)) << 16);
            const uint32_t differ = bits_of(value) ^ bits_of(to_bf16(x));
            others += (differ != 0) & ((differ != 0x80000000u) | (value != 0.0f));
            zeros += value == 0.0f;
            sum.source[i] += x * x;
            sum.error[i] += (x - value) * (x - value);
            sum.value[i] += value * value;
          }
        all.zeros += zeros;
        all.others += others;
        if (are_usual(&sum)) {
          add_sums(&sum, &all);
        } else {
          float values[KT_AUDIT_SUMMED];
          for (int64_t c = 0; c < width; c++)
            values[c] = from_bits((uint32_t)half_at(codes + 2 * c) << 16);
          add_extreme(w, values, width, &all);
        }
      }
    }
  found->squared_source += total(all.source);
  found->squared_error += total(all.error);
  found->squared_value += total(all.value);
  found->zeros += all.zeros;
  found->other_codes += all.others;
}

/* Functions of their own, in which all but the job is a constant. */
#define FLOATS(name, numbers, kind, fixed, tall)                                                   \
  static __attribute__((noinline)) void name(const kt_encoded_job *job, kt_encoded_audit *found) { \
    audit_floats(job, numbers, kind, fixed, tall, found);                                          \
  }

FLOATS(audit_fp8_rows, e4m3, KT_ENCODE_FP8, 0, 0)
FLOATS(audit_fp8_blocks, e4m3, KT_ENCODE_FP8, 0, 1)
FLOATS(audit_mxfp8, e4m3, KT_ENCODE_MXFP8, 32, 0)
FLOATS(audit_mxfp4, e2m1, KT_ENCODE_MXFP4, 32, 0)
FLOATS(audit_nvfp4, e2m1, KT_ENCODE_NVFP4, 16, 0)
#undef FLOATS

#endif
