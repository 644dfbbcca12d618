/* fixed_neon.h - integers of rows for fixed.h on NEON: 8 columns at a time. */
#ifndef KT_FIXED_NEON_H
#define KT_FIXED_NEON_H

#include "fixed.h"
#include "strip.h"

#include <arm_neon.h>

/* 4 magnitudes of binary32 as integers. */
KT_INLINE int16x4_t kt_fixed4_neon(uint32x4_t bits, float factor) {
  const float32x4_t w = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0x7fffffff)));
  return vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(w, factor)));
}

KT_INLINE int16x8_t kt_fixed8_neon(const uint8_t *row, int64_t k, int form, float factor) {
  uint32x4_t low, high;
  if (form == KT_ROW_BF16) {
    const uint16x8_t all = vreinterpretq_u16_u8(vld1q_u8(row + 2 * k));
    low = vshll_n_u16(vget_low_u16(all), 16), high = vshll_high_n_u16(all, 16);
  } else {
    low = vreinterpretq_u32_u8(vld1q_u8(row + 4 * k));
    high = vreinterpretq_u32_u8(vld1q_u8(row + 4 * k + 16));
  }
  return vcombine_s16(kt_fixed4_neon(low, factor), kt_fixed4_neon(high, factor));
}

/* sum + a * b, two products in a lane. */
KT_INLINE int32x4_t kt_fixed_dot_neon(int32x4_t sum, int16x8_t a, int16x8_t b) {
  return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(a), vget_low_s16(b)), a, b);
}

KT_INLINE int64_t kt_fixed_total_neon(int32x4_t sum) {
  return (int64_t)vaddlvq_u32(vreinterpretq_u32_s32(sum));
}

static inline void kt_fixed_row_neon(const uint8_t *row, int64_t cols, int form, float factor,
                                     int16_t *to, kt_fixed_moments *moments) {
  kt_fixed_moments found = {0, 0};
  for (int64_t k = 0, end; k < cols; k = end) {
    int32x4_t sum = vdupq_n_s32(0), square = sum;
    end = cols - k < KT_FIXED_BLOCK ? cols : k + KT_FIXED_BLOCK;
    for (int64_t at = k; at < end; at += 8) {
      const int16x8_t m = kt_fixed8_neon(row, at, form, factor), part = vshrq_n_s16(m, 5);
      vst1q_s16(to + at, m);
      sum = vpadalq_s16(sum, m);
      square = kt_fixed_dot_neon(square, part, part);
    }
    found.sum += kt_fixed_total_neon(sum);
    found.square += kt_fixed_total_neon(square);
  }
  if (moments) *moments = found;
}

#endif
