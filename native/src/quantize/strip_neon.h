/* strip_neon.h - the loops inside a strip (strip.h) on NEON: row maxima, 16 columns of 8-bit
 * codes, and half a tile in 16 transposes of 4x4 words. */
#ifndef KT_STRIP_NEON_H
#define KT_STRIP_NEON_H

#include "fixed_neon.h"
#include "search_neon.h"
#include "strip.h"

#include <arm_neon.h>

/* Source rows need no alignment, and vld1q_u16 and vld1q_u32 take pointers of their types. */
KT_INLINE uint16x8_t kt_load_u16(const uint8_t *at) { return vreinterpretq_u16_u8(vld1q_u8(at)); }
KT_INLINE uint32x4_t kt_load_u32(const uint8_t *at) { return vreinterpretq_u32_u8(vld1q_u8(at)); }

KT_INLINE uint32_t kt_row_max_neon(const uint8_t *row, int64_t cols, int form) {
  if (form == KT_ROW_BF16) {
    const uint16x8_t magnitude = vdupq_n_u16(0x7fff);
    uint16x8_t max0 = vdupq_n_u16(0), max1 = max0;
    for (int64_t at = 0; at < 2 * cols; at += 32) {
      max0 = vmaxq_u16(max0, vandq_u16(kt_load_u16(row + at), magnitude));
      max1 = vmaxq_u16(max1, vandq_u16(kt_load_u16(row + at + 16), magnitude));
    }
    return (uint32_t)vmaxvq_u16(vmaxq_u16(max0, max1)) << 16;
  }
  const uint32x4_t magnitude = vdupq_n_u32(0x7fffffff);
  uint32x4_t max0 = vdupq_n_u32(0), max1 = max0;
  for (int64_t at = 0; at < 4 * cols; at += 32) {
    max0 = vmaxq_u32(max0, vandq_u32(kt_load_u32(row + at), magnitude));
    max1 = vmaxq_u32(max1, vandq_u32(kt_load_u32(row + at + 16), magnitude));
  }
  return vmaxvq_u32(vmaxq_u32(max0, max1));
}

/* 4 values to codes: one product, one rounding to even. */
KT_INLINE int16x4_t kt_round4(uint32x4_t bits, float inverse, int flush) {
  if (flush) {
    const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    bits = vandq_u32(bits, vcgeq_u32(magnitude, vdupq_n_u32(0x00800000)));
  }
  return vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vreinterpretq_f32_u32(bits), inverse)));
}

/* 16 columns of a row from column k on as int8 codes. */
KT_INLINE int8x16_t kt_round16(const uint8_t *row, int64_t k, float inverse, int form, int flush) {
  uint32x4_t value[4];
  if (form == KT_ROW_BF16) {
    const uint16x8_t low = kt_load_u16(row + 2 * k), high = kt_load_u16(row + 2 * k + 16);
    value[0] = vshll_n_u16(vget_low_u16(low), 16), value[1] = vshll_high_n_u16(low, 16);
    value[2] = vshll_n_u16(vget_low_u16(high), 16), value[3] = vshll_high_n_u16(high, 16);
  } else {
    for (int i = 0; i < 4; i++) value[i] = kt_load_u32(row + 4 * k + 16 * i);
  }
  const int16x8_t low =
      vcombine_s16(kt_round4(value[0], inverse, flush), kt_round4(value[1], inverse, flush));
  const int16x8_t high =
      vcombine_s16(kt_round4(value[2], inverse, flush), kt_round4(value[3], inverse, flush));
  return vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
}

/* Stores word j of row[0..3], in row order, as group j from `to` on. */
KT_INLINE void kt_store_transposed4(const int8x16_t row[4], uint8_t *to) {
  uint32x4_t pair[4];
  for (int i = 0; i < 4; i += 2) { /* pair[i+p]: words p and p+2 of rows i, i+1 */
    const uint32x4_t a = vreinterpretq_u32_s8(row[i]), b = vreinterpretq_u32_s8(row[i + 1]);
    pair[i] = vtrn1q_u32(a, b), pair[i + 1] = vtrn2q_u32(a, b);
  }
  for (int p = 0; p < 2; p++) {
    const uint64x2_t a = vreinterpretq_u64_u32(pair[p]), b = vreinterpretq_u64_u32(pair[2 + p]);
    vst1q_u8(to + p * KT_GROUP_STRIDE, vreinterpretq_u8_u64(vtrn1q_u64(a, b)));
    vst1q_u8(to + (p + 2) * KT_GROUP_STRIDE, vreinterpretq_u8_u64(vtrn2q_u64(a, b)));
  }
}

/* Bytes j..j+15 of a row of a tile that begins at column k. */
typedef int8x16_t kt_tile_row_fn(const uint8_t *row, int64_t k, int j, float inverse, int form,
                                 int flush);

KT_INLINE void kt_half_tile_neon(kt_strip strip, int64_t k, const float *inverse,
                                 uint8_t *half_tile, int form, int flush,
                                 kt_tile_row_fn *tile_row) {
  for (int r = 0; r < KT_STRIP_ROWS; r += 4)
    for (int j = 0; j < KT_GROUP_STRIDE; j += 16) {
      int8x16_t row[4];
      for (int i = 0; i < 4; i++)
        row[i] = tile_row(strip.data + (r + i) * strip.row_size, k, j, inverse[r + i], form, flush);
      kt_store_transposed4(row, half_tile + j / 4 * KT_GROUP_STRIDE + 4 * r);
    }
}

#define KT_STRIP_LOOPS_NEON                                                                        \
  {kt_decode_rows_scalar, kt_row_max_neon, kt_magnitudes_neon, kt_code_sums_neon, kt_fixed_row_neon}

#endif
