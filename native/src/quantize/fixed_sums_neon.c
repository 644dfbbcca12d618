/* Sums over the codes of a row for the search in fixed point on NEON. */
#include "../cpu.h"

#if KT_ARM64
#include "fixed_neon.h"

/* Codes of 8 columns: the upper halves of products are put side by side. */
KT_INLINE int16x8_t codes_of(uint16x8_t m, uint16_t inverse, const int bits) {
  const kt_fixed_levels levels = kt_fixed_levels_of(bits);
  const uint16x8_t low = vreinterpretq_u16_u32(vmull_n_u16(vget_low_u16(m), inverse));
  const uint16x8_t high = vreinterpretq_u16_u32(vmull_high_n_u16(m, inverse));
  const uint16x8_t below = vqsubq_u16(vdupq_n_u16((uint16_t)levels.bound), vuzp2q_u16(low, high));
  const uint16x8_t down = bits == 4 ? vshrq_n_u16(below, 10) : vshrq_n_u16(below, 7);
  return vreinterpretq_s16_u16(vsubq_u16(vdupq_n_u16((uint16_t)levels.top), down));
}

KT_INLINE void sum_row(const int16_t *row, int64_t cols, const int bits, const uint16_t *inverse,
                       const int count, kt_fixed_sums *sums) {
  const int64_t most = bits == 4 ? KT_FIXED_BLOCK_4 : KT_FIXED_BLOCK_8;
  for (int i = 0; i < count; i++) sums[i] = (kt_fixed_sums){0, 0};
  for (int64_t begin = 0, end; begin < cols; begin = end) {
    int32x4_t product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
    KT_UNROLL(4) for (int i = 0; i < count; i++) product[i] = square[i] = vdupq_n_s32(0);
    end = cols - begin < most ? cols : begin + most;
    for (int64_t k = begin; k < end; k += 8) {
      const int16x8_t m = vld1q_s16(row + k);
      KT_UNROLL(4) for (int i = 0; i < count; i++) {
        const int16x8_t c = codes_of(vreinterpretq_u16_s16(m), inverse[i], bits);
        product[i] = kt_fixed_dot_neon(product[i], m, c);
        square[i] = kt_fixed_dot_neon(square[i], c, c);
      }
    }
    for (int i = 0; i < count; i++) {
      sums[i].product += kt_fixed_total_neon(product[i]);
      sums[i].square += kt_fixed_total_neon(square[i]);
    }
  }
}

void kt_fixed_sums_neon(const kt_fixed_row *row, int bits, const uint16_t *inverse, int count,
                        kt_fixed_sums *sums) {
  if (bits == 8)
    sum_row(row->m, row->cols, 8, inverse, KT_FIXED_AT_ONCE, sums);
  else if (count == 2)
    sum_row(row->m, row->cols, 4, inverse, 2, sums);
  else
    sum_row(row->m, row->cols, 4, inverse, KT_FIXED_AT_ONCE, sums);
}

#endif
