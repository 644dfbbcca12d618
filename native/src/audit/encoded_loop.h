/* encoded_loop.h - the pass, included by one file per level. See encoded.h. */
#ifndef KT_AUDIT_ENCODED_LOOP_H
#define KT_AUDIT_ENCODED_LOOP_H

#include "encoded_sums.h"
#include "source.h"

#include <math.h>

INLINE float scale_value(const kt_encoded_job *job, const int half, int64_t at) {
  uint16_t found;
  memcpy(&found, (const uint8_t *)job->scales + 2 * at, sizeof found);
  return half ? f16_value(found) : from_bits((uint32_t)found << 16);
}

/* binary16 of a number >= 0 up to 65504: the nearest multiple of 2^-24 below 2^-14, else of 2^-10
 * of the power of two below it. */
static uint16_t f16_of(float value) {
  int exponent;
  if (value < 0x1p-14f) return (uint16_t)rintf(value * 0x1p24f);
  const float fraction = frexpf(value, &exponent); /* 1/2 <= fraction < 1 */
  return (uint16_t)(((exponent + 13) << 10) + (int)rintf(fraction * 2048.0f));
}

/* The scale that the largest magnitude of a group makes: over half the number of levels but one,
 * in the dtype of the weights; never 0. */
INLINE uint16_t rule_scale(const kt_encoded_job *job, float amax) {
  const float scale = amax / (job->bits == 4 ? 7.5f : 127.5f);
  if (job->half) return f16_of(scale) ? f16_of(scale) : 0x1400;
  const uint16_t found = (uint16_t)(bits_of(to_bf16(scale)) >> 16);
  return found ? found : 0x3c00;
}

/* PIECE codes, less their offset. */
INLINE void codes_of(const uint8_t *restrict bytes, const int bits, int8_t *restrict codes) {
  if (bits == 8) {
    for (int c = 0; c < PIECE; c++) codes[c] = (int8_t)(bytes[c] ^ 0x80);
    return;
  }
  for (int c = 0; c < PIECE / 2; c++) {
    codes[2 * c] = (int8_t)((bytes[c] & 15) - 8);
    codes[2 * c + 1] = (int8_t)((bytes[c] >> 4) - 8);
  }
}

INLINE float larger(float a, float b) { return from_bits(choose(a > b, bits_of(a), bits_of(b))); }

/* A quotient rounded to the dtype of the weights, whose significand has 8 bits, or 11; below 2^-14,
 * where binary16 has fewer, it becomes code 0 all the same. */
INLINE float narrowed(float quotient, const int half) {
  const uint32_t bits = bits_of(quotient), last = half ? 13 : 16;
  const uint32_t odd = bits >> last & 1u, below = (1u << (last - 1)) - 1u;
  return from_bits((bits + below + odd) >> last << last);
}

/* Adds PIECE columns of a group. The code of a weight w is w / scale, narrowed and rounded to an
 * integer of `bits`, halves to the even one. */
INLINE void compare_piece(const float *restrict w, const int8_t *restrict codes, run_terms run,
                          const int bits, const int half, const int search,
                          group_state *restrict group, row_sums *restrict sum, sums *restrict all) {
  const float scale = run.scale, precise = run.precise;
  const int32_t top = (1 << (bits - 1)) - 1;
  float error[PIECE], value[PIECE], steps[PIECE];
  int32_t zeros = 0, others = 0, most = group->most;
  for (int c = 0; c < PIECE; c++) {
    const int32_t code = codes[c], magnitude = (int32_t)(bits_of(w[c]) & 0x7fffffffu);
    const float quotient = w[c] / scale;
    const float rounded = search ? quotient : narrowed(quotient, half);
    const float below = from_bits(choose(rounded < 256.0f, bits_of(rounded), bits_of(256.0f)));
    const float shifted = larger(below, -256.0f) + 0x1.8p23f; /* ends at the ones */
    const int32_t nearest = (int32_t)(bits_of(shifted) - bits_of(0x1.8p23f));
    const int32_t upper = nearest < top ? nearest : top;
    most = magnitude > most ? magnitude : most;
    value[c] = (float)code * scale;
    error[c] = w[c] - value[c];
    steps[c] = fabsf(quotient - (float)code) * precise;
    zeros += code == 0;
    others += code != (upper > -top - 1 ? upper : -top - 1);
  }
  group->most = most;
  all->zeros += zeros;
  all->others += others;
  for (int side = 0; side < PIECE; side += LANES)
    for (int i = 0; i < LANES; i++) {
      sum->source[i] += w[side + i] * w[side + i];
      sum->error[i] += error[side + i] * error[side + i];
      sum->value[i] += value[side + i] * value[side + i];
      sum->most_steps[i] = larger(steps[side + i], sum->most_steps[i]);
    }
}

/* `count` columns of a group (a multiple of PIECE); codes as stored. A level may have its own, in
 * the same order: bits of sums are the same. */
#ifndef KT_ENCODED_OWN_RUN
INLINE void compare_run(const float *w, const uint8_t *bytes, int64_t count, run_terms run,
                        const int bits, const int half, const int search, group_state *group,
                        row_sums *sum, sums *all) {
  for (int64_t c = 0; c < count; c += PIECE) {
    int8_t codes[PIECE];
    codes_of(bytes + c * bits / 8, bits, codes);
    compare_piece(w + c, codes, run, bits, half, search, group, sum, all);
  }
}
#endif

INLINE float largest(const float *lane) {
  float eight[LANES / 2], four[LANES / 4];
  for (int i = 0; i < LANES / 2; i++) eight[i] = larger(lane[i], lane[i + LANES / 2]);
  for (int i = 0; i < LANES / 4; i++) four[i] = larger(eight[i], eight[i + LANES / 4]);
  return larger(larger(four[0], four[1]), larger(four[2], four[3]));
}

/* Sums of KT_AUDIT_SUMMED columns at most are binary32, of more binary64. */
INLINE void add_sums(const row_sums *sum, sums *all) {
  for (int i = 0; i < LANES; i++) {
    all->source[i] += (double)sum->source[i];
    all->error[i] += (double)sum->error[i];
    all->value[i] += (double)sum->value[i];
  }
}

INLINE void add_steps(const row_sums *sum, sums *all) {
  int32_t more = 0;
  for (int i = 0; i < LANES; i++) more |= sum->most_steps[i] > all->known;
  if (more) all->known = largest(sum->most_steps);
}

/* Whether binary32 has the squares of these columns: weights of more than 2^40 or less than 2^-40,
 * or none but zeros, are added up by `add_extreme`. */
INLINE int are_usual(const row_sums *sum) {
  int32_t most = 0; /* in the order of bits */
  for (int i = 0; i < LANES; i++) {
    const int32_t bits = (int32_t)bits_of(sum->source[i]);
    most = bits > most ? bits : most;
  }
  return most >= (int32_t)bits_of(0x1p-80f) && most <= (int32_t)bits_of(0x1p80f);
}

/* What `add_sums` adds, of weights and of what their codes stand for. */
static __attribute__((noinline)) void add_extreme(const float *w, const float *values, int64_t cols,
                                                  sums *all) {
  for (int64_t c = 0; c < cols; c++) {
    const double x = (double)w[c], value = (double)values[c];
    all->source[c % LANES] += x * x;
    all->error[c % LANES] += (x - value) * (x - value);
    all->value[c % LANES] += value * value;
  }
}

/* What integer codes of a row stand for. */
static __attribute__((noinline)) void integer_values(const kt_encoded_job *job, int64_t row,
                                                     int64_t col, int64_t cols, float *values) {
  const uint8_t *const codes = job->codes + (row * job->source->cols + col) * job->bits / 8;
  for (int64_t c = 0; c < cols; c++) {
    const int byte = codes[c * job->bits / 8], nibble = byte >> (c % 2 ? 4 : 0) & 15;
    const int code = job->bits == 8 ? byte - 128 : nibble - 8;
    const int64_t at = row * job->groups + (col + c) / job->group;
    values[c] = (float)code * scale_value(job, job->half, at);
  }
}

/* Whether a scale is one that the search tries: from 0.35 to 1.25 of that of the rule, rounded. */
INLINE int is_searched(const kt_encoded_job *job, float amax, int64_t at) {
  const uint16_t rule = rule_scale(job, amax);
  const float scale = scale_value(job, job->half, at);
  const float of_rule = job->half ? f16_value(rule) : from_bits((uint32_t)rule << 16);
  if (!(amax >= 0x1p-60f && amax <= 0x1p60f)) return scale == of_rule;
  return scale > 0.0f && scale >= 0.34f * of_rule && scale <= 1.26f * of_rule;
}

INLINE void finish_group(const kt_encoded_job *job, int64_t at, group_state *group,
                         kt_encoded_audit *found) {
  uint16_t bits;
  memcpy(&bits, (const uint8_t *)job->scales + 2 * at, sizeof bits);
  const float amax = from_bits((uint32_t)group->most);
  found->other_scales += job->search ? !is_searched(job, amax, at) : bits != rule_scale(job, amax);
  group->most = 0;
}

static double total(const double *lane) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += lane[i];
  return sum;
}

INLINE void audit_codes(const kt_encoded_job *job, const int bits, const int half, const int search,
                        kt_encoded_audit *found) {
  const kt_matrix *const m = job->source;
  const int across = is_across(m);
  const int64_t at_once = across ? 2 * KT_AUDIT_ROWS : 1;
  const int64_t block = across ? KT_AUDIT_GATHERED : KT_AUDIT_SUMMED;
  const float smallest = half ? 0x1p-14f : 0x1p-126f; /* of scales that are precise enough */
  group_state groups[2 * KT_AUDIT_ROWS] = {{0}};
  sums all = {{0}, {0}, {0}, 0, 0, 0};
  for (int64_t row = 0; row < m->rows; row += at_once)
    for (int64_t col = 0, width; col < m->cols; col += width) {
      uint8_t room[ROOM_BYTES];
      width = least(block, m->cols - col);
      const stored s = stored_from(m, row, col, width, room);
      for (int64_t r = 0; r < at_once; r++) {
        float w[KT_AUDIT_SUMMED];
        source_values(m, stored_on(s, r), row + r, col, width, w);
        row_sums sum = {{0}, {0}, {0}, {0}, {0}, {0}};
        const uint8_t *const codes = job->codes + ((row + r) * m->cols + col) * bits / 8;
        int64_t at = (row + r) * job->groups + col / job->group;
        int64_t left = job->group - col % job->group; /* columns of the group */
        for (int64_t c = 0, count; c < width; c += count) {
          count = least(left, width - c);
          const float scale = scale_value(job, half, at);
          const run_terms run = {scale, scale >= smallest ? 1.0f : 0.0f};
          compare_run(w + c, codes + c * bits / 8, count, run, bits, half, search, groups + r, &sum,
                      &all);
          left -= count;
          if (left) continue;
          finish_group(job, at++, groups + r, found);
          left = job->group;
        }
        if (are_usual(&sum)) {
          add_sums(&sum, &all);
        } else {
          float values[KT_AUDIT_SUMMED];
          integer_values(job, row + r, col, width, values);
          add_extreme(w, values, width, &all);
        }
        add_steps(&sum, &all);
      }
    }
  found->max_steps = (double)all.known;
  found->squared_source += total(all.source);
  found->squared_error += total(all.error);
  found->squared_value += total(all.value);
  found->zeros += all.zeros;
  found->other_codes += all.others;
}

/* ---- Floating-point codes ----------------------------------------------------- */

#include "encoded_floats.h"

/* ---- All ---------------------------------------------------------------------- */

/* Functions of their own, in which all but the job is a constant. */
#define AUDIT(name, bits, half, search)                                                            \
  static __attribute__((noinline)) void name(const kt_encoded_job *job, kt_encoded_audit *found) { \
    audit_codes(job, bits, half, search, found);                                                   \
  }

AUDIT(audit_int4, 4, 0, 0)
AUDIT(audit_int4_half, 4, 1, 0)
AUDIT(audit_int4_search, 4, 0, 1)
AUDIT(audit_int4_half_search, 4, 1, 1)
AUDIT(audit_int8, 8, 0, 0)
AUDIT(audit_int8_half, 8, 1, 0)
AUDIT(audit_int8_search, 8, 0, 1)
AUDIT(audit_int8_half_search, 8, 1, 1)
#undef AUDIT

typedef void audit_fn(const kt_encoded_job *job, kt_encoded_audit *found);

/* [binary16][search] */
static audit_fn *const int4_audits[2][2] = {{audit_int4, audit_int4_search},
                                            {audit_int4_half, audit_int4_half_search}};
static audit_fn *const int8_audits[2][2] = {{audit_int8, audit_int8_search},
                                            {audit_int8_half, audit_int8_half_search}};

static void audit_encoded(const kt_encoded_job *job, kt_encoded_audit *found) {
  switch (job->kind) {
  case KT_ENCODE_INT4: int4_audits[job->half][job->search](job, found); break;
  case KT_ENCODE_INT8: int8_audits[job->half][job->search](job, found); break;
  case KT_ENCODE_MXFP4: audit_mxfp4(job, found); break;
  case KT_ENCODE_MXFP8: audit_mxfp8(job, found); break;
  case KT_ENCODE_NVFP4: audit_nvfp4(job, found); break;
  case KT_ENCODE_BF16: audit_bf16(job, found); break;
  default: (job->tall ? audit_fp8_blocks : audit_fp8_rows)(job, found);
  }
}

#endif
