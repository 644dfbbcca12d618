/* INT8 on AVX-512: the strips of strip_avx512.h, one byte per code. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../quantize/strip_avx512.h"
#include "int8.h"

/* A rounding that reaches -127 at most; the saturating packs do not go beyond 127. */
KT_INLINE __m512i nearest_tile_row(const uint8_t *row, int64_t k, __m512 inverse, int form,
                                   int flush) {
  return _mm512_max_epi8(kt_round64(row, k, inverse, form, flush), _mm512_set1_epi8(-127));
}

KT_INLINE void nearest_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,
                                 int form, int flush) {
  kt_half_tile_avx512(strip, k, inverse, to, form, flush, nearest_tile_row);
}

KT_INLINE void half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to, int form,
                         int flush) {
  kt_half_tile_avx512(strip, k, inverse, to, form, flush, kt_round64);
}

kt_status kt_int8_quantize_pack_avx512(const kt_layout *layout, const kt_matrix *m,
                                       const kt_choice *choice, uint8_t *packed, void *scale,
                                       float *scratch) {
  const kt_strip_rule rule = {KT_INT8_TILE_COLS,     KT_INT8_BLOCK_ROWS, 1,
                              KT_STRIP_LOOPS_AVX512, half_tile,          nearest_half_tile};
  return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);
}

KT_TARGET_END
#endif
