/* INT8 on NEON: the strips of strip_neon.h, one byte per code. */
#include "../cpu.h"

#if KT_ARM64
#include "../quantize/strip_neon.h"
#include "int8.h"

KT_INLINE int8x16_t tile_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                             int flush) {
  return kt_round16(row, k + j, inverse, form, flush);
}

KT_INLINE void half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to, int form,
                         int flush) {
  kt_half_tile_neon(strip, k, inverse, to, form, flush, tile_row);
}

/* A rounding that reaches -127 at most; the saturating packs do not go beyond 127. */
KT_INLINE int8x16_t nearest_tile_row(const uint8_t *row, int64_t k, int j, float inverse, int form,
                                     int flush) {
  return vmaxq_s8(kt_round16(row, k + j, inverse, form, flush), vdupq_n_s8(-127));
}

KT_INLINE void nearest_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,
                                 int form, int flush) {
  kt_half_tile_neon(strip, k, inverse, to, form, flush, nearest_tile_row);
}

kt_status kt_int8_quantize_pack_neon(const kt_layout *layout, const kt_matrix *m,
                                     const kt_choice *choice, uint8_t *packed, void *scale,
                                     float *scratch) {
  const kt_strip_rule rule = {KT_INT8_TILE_COLS,   KT_INT8_BLOCK_ROWS, 1,
                              KT_STRIP_LOOPS_NEON, half_tile,          nearest_half_tile};
  return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);
}

#endif
