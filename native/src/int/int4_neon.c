/* INT4 on NEON: the strips of strip_neon.h, two codes per byte. */
#include "../cpu.h"

#if KT_ARM64
#include "../quantize/strip_neon.h"
#include "int4.h"

/* Second rounding of 8-bit codes q: q+8 for q >= 0, q+7 for q < 0, whose high nibbles are
 * the nearest multiples of 16, ties away from zero. In range, since |q| <= 112. */
KT_INLINE uint8x16_t round_to_high_nibble(int8x16_t q) {
  const int8x16_t minus_one_below_zero = vreinterpretq_s8_u8(vcltzq_s8(q));
  return vreinterpretq_u8_s8(vaddq_s8(q, vaddq_s8(vdupq_n_s8(8), minus_one_below_zero)));
}

/* Low nibbles from the first 64 columns, high nibbles from the second. */
KT_INLINE int8x16_t tile_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                             int flush) {
  const uint8x16_t first = round_to_high_nibble(kt_round16(row, k + j, inverse, form, flush));
  const uint8x16_t second = round_to_high_nibble(kt_round16(row, k + 64 + j, inverse, form, flush));
  return vreinterpretq_s8_u8(vsriq_n_u8(second, first, 4));
}

KT_INLINE void half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to, int form,
                         int flush) {
  kt_half_tile_neon(strip, k, inverse, to, form, flush, tile_row);
}

/* The same by one rounding, which is cut to -7..7. */
KT_INLINE int8x16_t nearest_tile_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                                     int flush) {
  const int8x16_t top = vdupq_n_s8(7), bottom = vdupq_n_s8(-7);
  int8x16_t first = kt_round16(row, k + j, inverse, form, flush);
  int8x16_t second = kt_round16(row, k + 64 + j, inverse, form, flush);
  first = vmaxq_s8(vminq_s8(first, top), bottom);
  second = vmaxq_s8(vminq_s8(second, top), bottom);
  return vreinterpretq_s8_u8(
      vsliq_n_u8(vreinterpretq_u8_s8(first), vreinterpretq_u8_s8(second), 4));
}

KT_INLINE void nearest_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,
                                 int form, int flush) {
  kt_half_tile_neon(strip, k, inverse, to, form, flush, nearest_tile_row);
}

kt_status kt_int4_quantize_pack_neon(const kt_layout *layout, const kt_matrix *m,
                                     const kt_choice *choice, uint8_t *packed, void *scale,
                                     float *scratch) {
  const kt_strip_rule rule = {KT_INT4_TILE_COLS,   KT_INT4_BLOCK_ROWS, 2,
                              KT_STRIP_LOOPS_NEON, half_tile,          nearest_half_tile};
  return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);
}

#endif
