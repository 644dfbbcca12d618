/* INT8 on AVX2: the strips of strip_avx2.h, one byte per code. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../quantize/strip_avx2.h"
#include "int8.h"

KT_INLINE __m256i tile_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                           int flush) {
  return kt_round32(row, k + j, inverse, form, flush);
}

KT_INLINE void half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to, int form,
                         int flush) {
  kt_half_tile_avx2(strip, k, inverse, to, form, flush, tile_row);
}

/* A rounding that reaches -127 at most; the saturating packs do not go beyond 127. */
KT_INLINE __m256i nearest_tile_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                                   int flush) {
  return _mm256_max_epi8(kt_round32(row, k + j, inverse, form, flush), _mm256_set1_epi8(-127));
}

KT_INLINE void nearest_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,
                                 int form, int flush) {
  kt_half_tile_avx2(strip, k, inverse, to, form, flush, nearest_tile_row);
}

kt_status kt_int8_quantize_pack_avx2(const kt_layout *layout, const kt_matrix *m,
                                     const kt_choice *choice, uint8_t *packed, void *scale,
                                     float *scratch) {
  const kt_strip_rule rule = {KT_INT8_TILE_COLS,   KT_INT8_BLOCK_ROWS, 1,
                              KT_STRIP_LOOPS_AVX2, half_tile,          nearest_half_tile};
  return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);
}

KT_TARGET_END
#endif
