/* INT8 and INT4 on NEON: the strips of strip_neon.h. */
#include "../cpu.h"

#if KT_ARM64
#include "../quantize/strip_neon.h"
#include "int.h"

/* ---- INT8: one code in a byte ------------------------------------------------ */

KT_INLINE int8x16_t int8_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                             int flush) {
  return kt_round16(row, k + j, inverse, form, flush);
}

/* A rounding that reaches -127 at most; the saturating packs do not go beyond 127. */
KT_INLINE int8x16_t int8_nearest_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                                     int flush) {
  return vmaxq_s8(kt_round16(row, k + j, inverse, form, flush), vdupq_n_s8(-127));
}

KT_STRIP_PACKER(int8, KT_INT8, 1, neon, KT_STRIP_LOOPS_NEON)

/* ---- INT4: two codes in a byte ----------------------------------------------- */

/* Second rounding of 8-bit codes q: q+8 for q >= 0, q+7 for q < 0, whose high nibbles are
 * the nearest multiples of 16, ties away from zero. In range, since |q| <= 112. */
KT_INLINE uint8x16_t round_to_high_nibble(int8x16_t q) {
  const int8x16_t minus_one_below_zero = vreinterpretq_s8_u8(vcltzq_s8(q));
  return vreinterpretq_u8_s8(vaddq_s8(q, vaddq_s8(vdupq_n_s8(8), minus_one_below_zero)));
}

/* Low nibbles from the first 64 columns, high nibbles from the second. */
KT_INLINE int8x16_t int4_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                             int flush) {
  const uint8x16_t first = round_to_high_nibble(kt_round16(row, k + j, inverse, form, flush));
  const uint8x16_t second = round_to_high_nibble(kt_round16(row, k + 64 + j, inverse, form, flush));
  return vreinterpretq_s8_u8(vsriq_n_u8(second, first, 4));
}

/* The same by one rounding, which is cut to -7..7. */
KT_INLINE int8x16_t int4_nearest_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                                     int flush) {
  const int8x16_t top = vdupq_n_s8(7), bottom = vdupq_n_s8(-7);
  int8x16_t first = kt_round16(row, k + j, inverse, form, flush);
  int8x16_t second = kt_round16(row, k + 64 + j, inverse, form, flush);
  first = vmaxq_s8(vminq_s8(first, top), bottom);
  second = vmaxq_s8(vminq_s8(second, top), bottom);
  return vreinterpretq_s8_u8(
      vsliq_n_u8(vreinterpretq_u8_s8(first), vreinterpretq_u8_s8(second), 4));
}

KT_STRIP_PACKER(int4, KT_INT4, 2, neon, KT_STRIP_LOOPS_NEON)

#endif
