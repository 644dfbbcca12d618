/* decode_loops.h - what decoders written in plain C share: half precision, scales, bf16.
 *
 * Selections are bit masks, so that compilers vectorise the loops for the level of the file that
 * includes this. */
#ifndef KT_DECODE_LOOPS_H
#define KT_DECODE_LOOPS_H

#include "../quantize/rounding.h"
#include "../simd/target.h"
#include "matrix.h"

/* `yes` where the condition is 1, `no` where it is 0. */
KT_INLINE uint32_t kt_select(uint32_t condition, uint32_t yes, uint32_t no) {
  return no ^ ((no ^ yes) & (0u - condition));
}

KT_INLINE float kt_widen_f16(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  const uint32_t magnitude = half & 0x7fffu, sign = (uint32_t)(half & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
  const uint32_t subnormal = kt_bits((float)(int32_t)magnitude * 0x1p-24f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t finite = kt_select(magnitude < 0x0400u, subnormal, normal);
  return kt_float(sign | kt_select(magnitude >= 0x7c00u, special, finite));
}

/* Bytes of a number of KT_BF16, KT_F16, KT_F32 and KT_F8_E4M3; each is a unit. */
KT_INLINE int64_t kt_float_size(int dtype) {
  return dtype == KT_F32 ? 4 : dtype == KT_F8_E4M3 ? 1 : 2;
}

/* E4M3 widens to binary16 by a shift (exponent bias 15 instead of 7, subnormals included): that is
 * KT_E4M3_UNIT of the value. NaN, which the shift makes 1.875, becomes a NaN. */
#define KT_E4M3_UNIT 0x1p-8f

/* ---- After widening ------------------------------------------------------- */

KT_INLINE void scale_row(const kt_matrix *m, int64_t n, float *restrict row) {
  const float *const scales = m->block_scale + kt_grid_row(m, n);
  const float *const zeros = m->zero_point ? m->zero_point + kt_grid_row(m, n) : NULL;
  for (kt_grid_span s = kt_grid_first(m); s.begin < m->cols; s = kt_grid_next(m, s)) {
    const float scale = scales[s.col];
    if (zeros)
      for (int64_t i = s.begin; i < s.end; i++) row[i] -= zeros[s.col];
    for (int64_t i = s.begin; i < s.end; i++) row[i] *= scale;
  }
}

/* Round to nearest, ties to even, at bit 16. NaN and Inf keep being what they are. */
KT_INLINE void round_row_to_bf16(int64_t cols, float *restrict row) {
  for (int64_t k = 0; k < cols; k++) {
    const uint32_t bits = kt_bits(row[k]);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    row[k] = kt_float(kt_select((bits & 0x7f800000u) == 0x7f800000u, bits, rounded));
  }
}

KT_INLINE void kt_finish_row(const kt_matrix *m, int64_t n, float *row) {
  if (m->block_scale) scale_row(m, n, row);
  if (m->round_to_bf16) round_row_to_bf16(m->cols, row);
}

#endif
