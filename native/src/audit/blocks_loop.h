/* blocks_loop.h - the comparison of blocks with their source, included by one file per level.
 *
 * What a block can express is asked of its decoder (source_ggml.h): the same block with all codes
 * the lowest and all the highest, or of codebooks with each code once, in the low nibbles. A
 * weight's own code is the right one if no other number of its block is nearer. */
#ifndef KT_AUDIT_BLOCKS_LOOP_H
#define KT_AUDIT_BLOCKS_LOOP_H

#include "blocks.h"
#include "source.h"

#include <math.h>

enum { MOST_BYTES = 256, RUN = 32 };

/* Where the codes of a block are: bytes from `first` on; the byte of all lowest and highest codes,
 * and how many steps are between them. */
typedef struct codes_place {
  int first, end, low, high, steps;
} codes_place;

INLINE codes_place codes_in(const int32_t dtype) {
  switch (dtype) {
  case KT_Q8_0: return (codes_place){2, 34, 0x81, 0x7f, 254};
  case KT_Q4_K: return (codes_place){16, 144, 0, 0xff, 15};
  case KT_Q5_K: return (codes_place){16, 176, 0, 0xff, 31};
  case KT_Q6_K: return (codes_place){0, 192, 0, 0xff, 63};
  case KT_MXFP4: return (codes_place){1, 17, 0, 0, 0};
  case KT_IQ4_NL: return (codes_place){2, 18, 0, 0, 0};
  default: return (codes_place){2, 18, 0, 0xff, 15};
  }
}

INLINE void block_values(const int32_t dtype, const uint8_t *block, int first, float *out) {
  switch (dtype) {
  case KT_Q8_0: q8_0_columns(block, first, out); break;
  case KT_Q4_K: q4_k_columns(block, first, out); break;
  case KT_Q5_K: q5_k_columns(block, first, out); break;
  case KT_Q6_K: q6_k_columns(block, first, out); break;
  case KT_MXFP4: mxfp4_columns(block, first, out); break;
  case KT_IQ4_NL: iq4_nl_columns(block, first, out); break;
  default: q4_0_columns(block, first, out); break;
  }
}

/* Sums of 32 columns of a row, in as many lanes. */
typedef struct run_sums {
  double source[RUN], error[RUN], value[RUN];
  float most_steps[RUN];
  int64_t zeros, others;
} run_sums;

INLINE void add_run(const float *w, const float *v, run_sums *sum) {
  int32_t zeros = 0;
  for (int l = 0; l < RUN; l++) {
    const double weight = (double)w[l], value = (double)v[l], off = weight - value;
    sum->source[l] += weight * weight;
    sum->error[l] += off * off;
    sum->value[l] += value * value;
    zeros += v[l] == 0.0f;
  }
  sum->zeros += zeros;
}

/* Evenly spaced numbers from a to b. */
INLINE void compare_even(const float *w, const float *v, const float *a, const float *b, int steps,
                         run_sums *sum) {
  const float part = 1.0f / (float)steps;
  int32_t others = 0;
  for (int l = 0; l < RUN; l++) {
    const float low = a[l] < b[l] ? a[l] : b[l], high = a[l] < b[l] ? b[l] : a[l];
    const float step = (high - low) * part;
    const float above = w[l] > low ? w[l] : low, inside = above < high ? above : high;
    const float off = fabsf(inside - v[l]), beyond = fabsf(w[l] - v[l]);
    /* Values and ends are rounded: by less than 2^-20 of the largest of them. */
    const float slack = 0x1p-20f * (fabsf(low) + fabsf(high));
    others += !(off <= 0.5f * step + slack);
    const float taken = step > 0x1p-100f ? beyond / step : 0.0f;
    sum->most_steps[l] = taken > sum->most_steps[l] ? taken : sum->most_steps[l];
  }
  sum->others += others;
}

INLINE void audit_as(const kt_audited_blocks *job, const int32_t dtype, kt_encoded_audit *found) {
  const kt_matrix *const m = job->source;
  const audit_unit unit = audit_units[dtype];
  const codes_place place = codes_in(dtype);
  const int across = is_across(m);
  const int64_t at_once = across ? 2 * KT_AUDIT_ROWS : 1;
  const int64_t piece = across ? KT_AUDIT_GATHERED : KT_AUDIT_BLOCK;
  const int64_t row_bytes = m->cols / unit.cols * unit.bytes;
  run_sums sum = {{0}, {0}, {0}, {0}, 0, 0};
  for (int64_t row = 0; row < m->rows; row += at_once)
    for (int64_t col = 0, width; col < m->cols; col += width) {
      uint8_t room[ROOM_BYTES];
      width = least(piece, m->cols - col);
      const stored s = stored_from(m, row, col, width, room);
      for (int64_t r = 0; r < at_once; r++) {
        float w[KT_AUDIT_BLOCK], v[RUN];
        source_values(m, stored_on(s, r), row + r, col, width, w);
        for (int64_t c = 0; c < width; c += RUN) {
          const int64_t at = col + c;
          const uint8_t *const block =
              job->blocks + (row + r) * row_bytes + at / unit.cols * unit.bytes;
          const int first = (int)(at % unit.cols);
          uint8_t other[MOST_BYTES];
          block_values(dtype, block, first, v);
          add_run(w + c, v, &sum);
          memcpy(other, block, (size_t)unit.bytes);
          if (place.steps) {
            float a[RUN], b[RUN];
            memset(other + place.first, place.low, (size_t)(place.end - place.first));
            block_values(dtype, other, first, a);
            memset(other + place.first, place.high, (size_t)(place.end - place.first));
            block_values(dtype, other, first, b);
            compare_even(w + c, v, a, b, place.steps, &sum);
            continue;
          }
          float nearest[RUN], numbers[RUN];
          for (int code = 0; code < 16; code++) other[place.first + code] = (uint8_t)code;
          block_values(dtype, other, first, numbers);
          for (int code = 0; code < 16; code++)
            for (int l = 0; l < RUN; l++) {
              const float off = fabsf(w[c + l] - numbers[code]);
              nearest[l] = code && nearest[l] < off ? nearest[l] : off;
            }
          int32_t others = 0;
          for (int l = 0; l < RUN; l++)
            others += !(fabsf(w[c + l] - v[l]) <=
                        nearest[l] + 0x1p-18f * (fabsf(w[c + l]) + fabsf(v[l])));
          sum.others += others;
        }
      }
    }
  for (int l = 0; l < RUN; l++) {
    found->squared_source += sum.source[l];
    found->squared_error += sum.error[l];
    found->squared_value += sum.value[l];
    found->max_steps =
        sum.most_steps[l] > (float)found->max_steps ? (double)sum.most_steps[l] : found->max_steps;
  }
  found->zeros = sum.zeros;
  found->other_codes = sum.others;
}

/* Functions of their own, in which the type is a constant. */
#define AUDIT(name, dtype)                                                                         \
  static __attribute__((noinline)) void name(const kt_audited_blocks *job,                         \
                                             kt_encoded_audit *found) {                            \
    audit_as(job, dtype, found);                                                                   \
  }

AUDIT(audit_q4_0, KT_Q4_0)
AUDIT(audit_q8_0, KT_Q8_0)
AUDIT(audit_q4_k, KT_Q4_K)
AUDIT(audit_q5_k, KT_Q5_K)
AUDIT(audit_q6_k, KT_Q6_K)
AUDIT(audit_iq4_nl, KT_IQ4_NL)
AUDIT(audit_mxfp4, KT_MXFP4)
#undef AUDIT

static void audit_any_blocks(const kt_audited_blocks *job, kt_encoded_audit *found) {
  switch (job->dtype) {
  case KT_Q8_0: audit_q8_0(job, found); break;
  case KT_Q4_K: audit_q4_k(job, found); break;
  case KT_Q5_K: audit_q5_k(job, found); break;
  case KT_Q6_K: audit_q6_k(job, found); break;
  case KT_IQ4_NL: audit_iq4_nl(job, found); break;
  case KT_MXFP4: audit_mxfp4(job, found); break;
  default: audit_q4_0(job, found);
  }
}

#endif
