/* encode_loop.h - the pass, included by one file per level. See encode.h. */
#ifndef KT_ENCODE_LOOP_H
#define KT_ENCODE_LOOP_H

#include "../quantize/rounding.h"
#include "../simd/bits.h"
#include "encode.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* ---- Numbers ------------------------------------------------------------------ */

/* The bits of a finite binary32 whose significand is rounded to that of bf16, or of binary16 where
 * that has the number as a normal one: smaller quotients become code 0 either way. */
INLINE uint32_t rounded_bits(uint32_t bits, const int half) {
  const int dropped = half ? 13 : 16;
  return (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) & ~((1u << dropped) - 1);
}

/* The nearest binary16 of a number >= 0 that is no NaN, ties to even. */
static uint16_t half_bits(float value) {
  if (value >= 65520.0f) return 0x7c00;
  if (value < 0x1p-14f) return (uint16_t)kt_round_even(value * 0x1p24f);
  return (uint16_t)((rounded_bits(kt_bits(value), 1) - (112u << 23)) >> 13);
}

/* The nearest E4M3 of a magnitude, ties to even, at most 448. Binary32 has the same fields 20 bits
 * further up, with a bias larger by 120; below 2^-6 codes are multiples of 2^-9. */
INLINE uint32_t e4m3_magnitude(uint32_t magnitude) {
  const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  const uint32_t small = kt_bits(kt_float(magnitude) * 512.0f + 12582912.0f) - 0x4b400000u;
  const uint32_t is_small =
      0u - (magnitude < 0x3c800000u); /* no branch, which would not become a vector */
  const uint32_t code = (small & is_small) | (normal & ~is_small);
  return code < 0x7eu ? code : 0x7eu;
}

INLINE uint8_t e4m3_code(float y) {
  const uint32_t bits = kt_bits(y);
  return (uint8_t)((bits >> 24 & 0x80u) | e4m3_magnitude(bits & 0x7fffffffu));
}

/* The nearest E2M1, ties to even. Binary32 has the same fields 22 bits further up, with a bias
 * larger by 126; below 1 codes are multiples of 1/2. */
INLINE uint8_t e2m1_code(float y) {
  const uint32_t bits = kt_bits(y), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x1fffffu + (magnitude >> 22 & 1)) >> 22) - (126u << 1);
  const uint32_t small = kt_bits(kt_float(magnitude) * 2.0f + 12582912.0f) - 0x4b400000u;
  const uint32_t is_small = 0u - (magnitude < 0x3f800000u);
  const uint32_t code = (small & is_small) | (normal & ~is_small);
  return (uint8_t)((bits >> 28 & 8u) | (code < 7u ? code : 7u));
}

INLINE float e4m3_value(uint8_t code) {
  return kt_float((uint32_t)(code & 0x7fu) << 20) * 0x1p120f;
}

/* ---- Scales ------------------------------------------------------------------- */

/* What divides the weights of a group, and what is stored for it. */
typedef struct scale {
  float divisor;
  uint32_t stored;
} scale;

/* max / ((2^bits - 1) / 2), rounded to the dtype of the weights; the dtype's epsilon where that is
 * 0 (compressed-tensors, calculate_qparams). */
INLINE scale int_scale(float amax, float half_range, const int half) {
  if (half) {
    const uint16_t bits = half_bits(amax / half_range);
    if (!bits) return (scale){0x1p-10f, 0x1400};
    const uint32_t normal = ((uint32_t)bits << 13) + (112u << 23);
    return (scale){bits < 0x400 ? (float)bits * 0x1p-24f : kt_float(normal), bits};
  }
  const uint32_t bits = rounded_bits(kt_bits(amax / half_range), 0);
  return bits ? (scale){kt_float(bits), bits >> 16} : (scale){0x1p-7f, 0x3c00};
}

INLINE scale fp8_scale(float amax) {
  const float found = (amax > 1e-30f ? amax : 1e-30f) / 448.0f;
  return (scale){found, kt_bits(found)};
}

/* 2^e with the largest magnitude below 1.75 * 2^(e + top + 1), at least half of that: no weight
 * is more than half a step beyond the levels (compressed-tensors, generate_mx_scales). */
INLINE scale mx_scale(float amax, int32_t top) {
  const int32_t exponent = (int32_t)((kt_bits(amax) + (1u << 21)) >> 23) - top;
  const uint32_t stored = exponent > 0 ? (uint32_t)(exponent < 254 ? exponent : 254) : 0;
  return (scale){stored ? kt_float(stored << 23) : 0x1p-127f, stored};
}

/* tensor_scale * max / 6 in E4M3; 1/8 where that is 0. Weights are divided by it over
 * tensor_scale. */
INLINE scale nvfp4_scale(float amax, float tensor_scale) {
  uint32_t code = e4m3_magnitude(kt_bits(tensor_scale * (amax / 6.0f)));
  if (!code) code = 0x20; /* 2^-3 */
  return (scale){e4m3_value((uint8_t)code) / tensor_scale, code};
}

/* ---- Groups ------------------------------------------------------------------- */

INLINE uint32_t largest_bits(const float *x, int64_t count) {
  int32_t most = 0;
  for (int64_t k = 0; k < count; k++) {
    const int32_t magnitude = (int32_t)(kt_bits(x[k]) & 0x7fffffffu);
    most = magnitude > most ? magnitude : most;
  }
  return (uint32_t)most;
}

/* A level may have codes of the first columns, and largest magnitudes of the first groups, by
 * itself, with the same bits; how many. */
#ifndef KT_ENCODE_OWN_CODES
INLINE int64_t own_int_codes(const float *x, int64_t count, float divisor, int32_t top,
                             int32_t bias, const int half, uint8_t *codes) {
  (void)x, (void)count, (void)divisor, (void)top, (void)bias, (void)half, (void)codes;
  return 0;
}

INLINE int64_t own_e2m1_codes(const float *x, int64_t count, float divisor, const int power,
                              uint8_t *codes) {
  (void)x, (void)count, (void)divisor, (void)power, (void)codes;
  return 0;
}

INLINE int64_t own_nibbles(const uint8_t *codes, int64_t cols, uint8_t *bytes) {
  (void)codes, (void)cols, (void)bytes;
  return 0;
}

INLINE int64_t own_largest(const float *x, int64_t groups, int64_t group, float *most) {
  (void)x, (void)groups, (void)group, (void)most;
  return 0;
}
#endif

INLINE void int_codes(const float *restrict x, int64_t count, float divisor, int32_t top,
                      int32_t bias, const int half, uint8_t *restrict codes) {
  for (int64_t k = own_int_codes(x, count, divisor, top, bias, half, codes); k < count; k++) {
    const float y = kt_float(rounded_bits(kt_bits(x[k] / divisor), half));
    const int32_t code = kt_round_even(y), below = code < top ? code : top;
    codes[k] = (uint8_t)((below > ~top ? below : ~top) + bias);
  }
}

/* One rounding of quotients, which are below 2^31 in magnitude. */
INLINE void nearest_codes(const float *restrict x, int64_t count, float divisor, int32_t top,
                          int32_t bias, uint8_t *restrict codes) {
  for (int64_t k = 0; k < count; k++) {
    const int32_t code = kt_round_even(x[k] / divisor), below = code < top ? code : top;
    codes[k] = (uint8_t)((below > ~top ? below : ~top) + bias);
  }
}

/* `power`: divisors are powers of two, whose reciprocals binary32 has: a product is the quotient,
 * and takes a fifth of its time. */
INLINE void e4m3_codes(const float *restrict x, int64_t count, float divisor, const int power,
                       uint8_t *restrict codes) {
  const float inverse = 1.0f / divisor;
  for (int64_t k = 0; k < count; k++) codes[k] = e4m3_code(power ? x[k] * inverse : x[k] / divisor);
}

INLINE void e2m1_codes(const float *restrict x, int64_t count, float divisor, const int power,
                       uint8_t *restrict codes) {
  const float inverse = 1.0f / divisor;
  for (int64_t k = own_e2m1_codes(x, count, divisor, power, codes); k < count; k++)
    codes[k] = e2m1_code(power ? x[k] * inverse : x[k] / divisor);
}

/* Two codes in a byte, the even column in the low nibble. */
INLINE void join_nibbles(const uint8_t *restrict codes, int64_t cols, uint8_t *restrict bytes) {
  for (int64_t k = own_nibbles(codes, cols, bytes) / 2; k < cols / 2; k++)
    bytes[k] = (uint8_t)(codes[2 * k] | codes[2 * k + 1] << 4);
}

#include "encode_search.h"

/* ---- Rows --------------------------------------------------------------------- */

INLINE scale scale_of(float tensor_scale, float amax, const int kind, const int half) {
  switch (kind) {
  case KT_ENCODE_INT4: return int_scale(amax, 7.5f, half);
  case KT_ENCODE_INT8: return int_scale(amax, 127.5f, half);
  case KT_ENCODE_MXFP4: return mx_scale(amax, 2);
  case KT_ENCODE_MXFP8: return mx_scale(amax, 8);
  case KT_ENCODE_NVFP4: return nvfp4_scale(amax, tensor_scale);
  default: return fp8_scale(amax);
  }
}

INLINE void codes_of(const float *x, int64_t count, float divisor, const int kind, const int half,
                     uint8_t *codes) {
  switch (kind) {
  case KT_ENCODE_INT4: int_codes(x, count, divisor, 7, 8, half, codes); break;
  case KT_ENCODE_INT8: int_codes(x, count, divisor, 127, 128, half, codes); break;
  case KT_ENCODE_MXFP4: e2m1_codes(x, count, divisor, 1, codes); break;
  case KT_ENCODE_NVFP4: e2m1_codes(x, count, divisor, 0, codes); break;
  case KT_ENCODE_MXFP8: e4m3_codes(x, count, divisor, 1, codes); break;
  default: e4m3_codes(x, count, divisor, 0, codes);
  }
}

INLINE void store_scale(void *scales, int64_t at, uint32_t stored, const int kind) {
  if (kind == KT_ENCODE_FP8)
    ((uint32_t *)scales)[at] = stored;
  else if (kind == KT_ENCODE_INT4 || kind == KT_ENCODE_INT8)
    ((uint16_t *)scales)[at] = (uint16_t)stored;
  else
    ((uint8_t *)scales)[at] = (uint8_t)stored;
}

/* Decodes rows from n on, KT_ENCODE_ROWS at most and none from `end` on; how many. */
static int64_t decode_some(const kt_encode_job *job, int64_t n, int64_t end) {
  const int64_t count = end - n < KT_ENCODE_ROWS ? end - n : KT_ENCODE_ROWS;
  job->decode(job->source, n, count, job->scratch, kt_scratch_stride(job->source->cols));
  return count;
}

INLINE const float *row_of(const kt_encode_job *job, int64_t r) {
  return job->scratch + r * kt_scratch_stride(job->source->cols);
}

/* Where codes of a row are before two of them share a byte: else where they are stored. */
INLINE uint8_t *room_for(const kt_encode_job *job, int64_t n, const int nibbles) {
  const int64_t behind = (KT_ENCODE_ROWS + 1) * kt_scratch_stride(job->source->cols);
  return nibbles ? (uint8_t *)(job->scratch + behind) : job->codes + n * job->row_size;
}

INLINE void finish_row(const kt_encode_job *job, int64_t n, uint8_t *codes, const int nibbles) {
  uint8_t *const row = job->codes + n * job->row_size;
  const int64_t cols = job->source->cols, bytes = nibbles ? (cols + 1) / 2 : cols;
  if (nibbles) {
    if (cols % 2) codes[cols] = 0;
    join_nibbles(codes, cols + cols % 2, row);
  }
  memset(row + bytes, 0, (size_t)(job->row_size - bytes)); /* columns of the last word */
}

/* The scales of a row, of all groups at once: loops over groups become vectors. What weights are
 * divided by is left in `divisor`. Bits of the largest magnitude. */
INLINE uint32_t row_scales(const kt_encode_job *job, int64_t n, const float *x, int64_t group,
                           const int kind, const int half, float *restrict divisor) {
  const int64_t groups = job->groups, stride = kt_scratch_stride(job->source->cols);
  float *restrict const most = divisor + stride;
  uint32_t *restrict const stored = (uint32_t *)(void *)(divisor + 2 * stride);
  const float tensor_scale = job->tensor_scale;
  uint32_t largest = 0;
  for (int64_t g = own_largest(x, groups, group, most); g < groups; g++)
    most[g] = kt_float(largest_bits(x + g * group, group));
  for (int64_t g = 0; g < groups; g++) {
    const uint32_t bits = kt_bits(most[g]);
    largest = bits > largest ? bits : largest;
  }
  for (int64_t g = 0; g < groups; g++) {
    const scale found = scale_of(tensor_scale, most[g], kind, half);
    stored[g] = found.stored;
    divisor[g] = found.divisor;
  }
  for (int64_t g = 0; g < groups; g++) store_scale(job->scales, n * groups + g, stored[g], kind);
  return largest;
}

/* Scales of rows by themselves. `fixed`: the group, if it is a constant, else 0. */
INLINE kt_status encode_rows(const kt_encode_job *job, const int kind, const int half,
                             const int64_t fixed) {
  const int64_t group = fixed ? fixed : job->group;
  const int nibbles = kind == KT_ENCODE_INT4 || kind == KT_ENCODE_MXFP4 || kind == KT_ENCODE_NVFP4;
  float *const divisor = job->scratch + (KT_ENCODE_ROWS + 2) * kt_scratch_stride(job->source->cols);
  for (int64_t n = 0, count; n < job->source->rows; n += count) {
    count = decode_some(job, n, job->source->rows);
    for (int64_t r = 0; r < count; r++) {
      const float *const x = row_of(job, r);
      uint8_t *const codes = room_for(job, n + r, nibbles);
      if (row_scales(job, n + r, x, group, kind, half, divisor) >= KT_NONFINITE_BITS)
        return KT_ERR_NONFINITE;
      for (int64_t g = 0; g < job->groups; g++)
        codes_of(x + g * group, group, divisor[g], kind, half, codes + g * group);
      finish_row(job, n + r, codes, nibbles);
    }
  }
  return KT_OK;
}

/* FP8 with a scale for KT_ENCODE_BLOCK rows and columns: rows are decoded twice. The last blocks
 * may be cut. */
INLINE kt_status encode_blocks(const kt_encode_job *job) {
  const int64_t rows = job->source->rows, cols = job->source->cols,
                stride = kt_scratch_stride(cols);
  float *const divisor = job->scratch + KT_ENCODE_ROWS * stride;
  for (int64_t first = 0; first < rows; first += KT_ENCODE_BLOCK) {
    const int64_t end = rows - first < KT_ENCODE_BLOCK ? rows : first + KT_ENCODE_BLOCK;
    memset(divisor, 0, (size_t)job->groups * sizeof *divisor);
    for (int64_t n = first, count; n < end; n += count) {
      count = decode_some(job, n, end);
      for (int64_t r = 0; r < count; r++)
        for (int64_t g = 0, k = 0; g < job->groups; g++, k += job->group) {
          const int64_t width = cols - k < job->group ? cols - k : job->group;
          const float most = kt_float(largest_bits(row_of(job, r) + k, width));
          if (kt_bits(most) >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
          divisor[g] = most > divisor[g] ? most : divisor[g];
        }
    }
    for (int64_t g = 0; g < job->groups; g++) {
      const scale found = fp8_scale(divisor[g]);
      store_scale(job->scales, first / KT_ENCODE_BLOCK * job->groups + g, found.stored,
                  KT_ENCODE_FP8);
      divisor[g] = found.divisor;
    }
    for (int64_t n = first, count; n < end; n += count) {
      count = decode_some(job, n, end);
      for (int64_t r = 0; r < count; r++)
        for (int64_t g = 0, k = 0; g < job->groups; g++, k += job->group) {
          const int64_t width = cols - k < job->group ? cols - k : job->group;
          e4m3_codes(row_of(job, r) + k, width, divisor[g], 0,
                     job->codes + (n + r) * job->row_size + k);
        }
    }
  }
  return KT_OK;
}

/* bf16: weights beyond it become infinite. */
static __attribute__((noinline)) kt_status plain_rows(const kt_encode_job *job) {
  const int64_t cols = job->source->cols;
  for (int64_t n = 0, count; n < job->source->rows; n += count) {
    count = decode_some(job, n, job->source->rows);
    for (int64_t r = 0; r < count; r++) {
      const float *const x = row_of(job, r);
      uint8_t *const codes = job->codes + (n + r) * job->row_size;
      if (largest_bits(x, cols) >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
      for (int64_t k = 0; k < cols; k++) {
        const uint16_t code = (uint16_t)(rounded_bits(kt_bits(x[k]), 0) >> 16);
        memcpy(codes + 2 * k, &code, sizeof code);
      }
    }
  }
  return KT_OK;
}

/* Bits of the largest magnitude of a row of bf16 as it is stored. */
INLINE uint32_t largest_stored(const uint8_t *stored, int64_t cols) {
  int16_t most = 0;
  for (int64_t k = 0; k < cols; k++) {
    uint16_t bits;
    memcpy(&bits, stored + 2 * k, sizeof bits);
    const int16_t magnitude = (int16_t)(bits & 0x7fff);
    most = magnitude > most ? magnitude : most;
  }
  return (uint32_t)most << 16;
}

static __attribute__((noinline)) kt_status largest_of_all(const kt_encode_job *job) {
  const kt_matrix *const m = job->source;
  uint32_t most = 0;
  if (m->dtype == KT_BF16 && m->col_stride == 1 && !m->block_scale && !m->row_factor &&
      !m->col_factor) {
    for (int64_t n = 0; n < m->rows; n++) {
      const uint8_t *const row = (const uint8_t *)m->data + 2 * n * m->row_stride;
      const uint32_t here = largest_stored(row, m->cols);
      most = here > most ? here : most;
    }
    *job->largest = kt_float(most);
    return most < KT_NONFINITE_BITS ? KT_OK : KT_ERR_NONFINITE;
  }
  for (int64_t n = 0, count; n < job->source->rows; n += count) {
    count = decode_some(job, n, job->source->rows);
    for (int64_t r = 0; r < count; r++) {
      const uint32_t here = largest_bits(row_of(job, r), job->source->cols);
      most = here > most ? here : most;
    }
  }
  *job->largest = kt_float(most);
  return most < KT_NONFINITE_BITS ? KT_OK : KT_ERR_NONFINITE;
}

/* Whether weights have 11 bits at most, bf16's or binary16's: times a code no more than the 24 of
 * binary32. */
static int has_short_weights(const kt_matrix *m) {
  if (m->row_factor || m->col_factor) return 0;
  return m->round_to_bf16 || ((m->dtype == KT_BF16 || m->dtype == KT_F16) && !m->block_scale);
}

/* What weights of `rows` decoded rows, from n on, are divided by: LANES groups at a time, the last
 * of which are repeated where there are fewer. Stores scales. */
static kt_status search_groups_of(const kt_encode_job *job, int64_t n, int64_t rows,
                                  float *divisor) {
  const int bits = job->encoding->kind == KT_ENCODE_INT4 ? 4 : 8, half = job->encoding->half;
  const int64_t all = rows * job->groups;
  search_groups groups = {.count = job->group,
                          .top = bits == 4 ? 7.0f : 127.0f,
                          .half = half,
                          .exact = has_short_weights(job->source)};
  for (int64_t first = 0; first < all; first += LANES) {
    float found[LANES];
    for (int64_t i = 0; i < LANES; i++) {
      const int64_t at = first + i < all ? first + i : all - 1;
      groups.at[i] = row_of(job, at / job->groups) + at % job->groups * job->group;
    }
    if (searched_scales(&groups, bits, found) >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
    for (int64_t i = 0; i < LANES && first + i < all; i++) {
      const uint32_t stored = half ? half_bits(found[i]) : kt_bits(found[i]) >> 16;
      divisor[first + i] = found[i];
      store_scale(job->scales, n * job->groups + first + i, stored, KT_ENCODE_INT4);
    }
  }
  return KT_OK;
}

/* INT4 and INT8 with searched scales. Behind the decoded rows: what divides their groups. */
static kt_status search_rows(const kt_encode_job *job) {
  const int nibbles = job->encoding->kind == KT_ENCODE_INT4;
  const int32_t top = nibbles ? 7 : 127;
  float *const divisor = job->scratch + (KT_ENCODE_ROWS + 2) * kt_scratch_stride(job->source->cols);
  for (int64_t n = 0, count; n < job->source->rows; n += count) {
    count = decode_some(job, n, job->source->rows);
    const kt_status status = search_groups_of(job, n, count, divisor);
    if (status) return status;
    for (int64_t r = 0; r < count; r++) {
      const float *const x = row_of(job, r);
      uint8_t *const codes = room_for(job, n + r, nibbles);
      for (int64_t g = 0; g < job->groups; g++)
        nearest_codes(x + g * job->group, job->group, divisor[r * job->groups + g], top, top + 1,
                      codes + g * job->group);
      finish_row(job, n + r, codes, nibbles);
    }
  }
  return KT_OK;
}

/* Functions of their own, in which all but the job is a constant. */
#define ENCODE(name, kind, half, fixed)                                                            \
  static __attribute__((noinline)) kt_status name(const kt_encode_job *job) {                      \
    return encode_rows(job, kind, half, fixed);                                                    \
  }

ENCODE(int4_bf16, KT_ENCODE_INT4, 0, 0)
ENCODE(int4_bf16_32, KT_ENCODE_INT4, 0, 32)
ENCODE(int4_half, KT_ENCODE_INT4, 1, 0)
ENCODE(int8_bf16, KT_ENCODE_INT8, 0, 0)
ENCODE(int8_half, KT_ENCODE_INT8, 1, 0)
ENCODE(fp8_rows, KT_ENCODE_FP8, 0, 0)
ENCODE(mxfp4, KT_ENCODE_MXFP4, 0, 32)
ENCODE(mxfp8, KT_ENCODE_MXFP8, 0, 32)
ENCODE(nvfp4, KT_ENCODE_NVFP4, 0, 16)
#undef ENCODE

static kt_status encode_any(const kt_encode_job *job) {
  if (job->largest) return largest_of_all(job);
  if (job->encoding->search) return search_rows(job);
  const int half = job->encoding->half, group = job->encoding->group;
  switch (job->encoding->kind) {
  case KT_ENCODE_INT4:
    if (half) return int4_half(job);
    return group == 32 ? int4_bf16_32(job) : int4_bf16(job);
  case KT_ENCODE_INT8: return half ? int8_half(job) : int8_bf16(job);
  case KT_ENCODE_MXFP4: return mxfp4(job);
  case KT_ENCODE_MXFP8: return mxfp8(job);
  case KT_ENCODE_NVFP4: return nvfp4(job);
  case KT_ENCODE_BF16: return plain_rows(job);
  default: return group ? encode_blocks(job) : fp8_rows(job);
  }
}

#endif
