/* INT4 on AVX2: the strips of strip_avx2.h, two codes per byte. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../quantize/strip_avx2.h"
#include "int4.h"

/* Second rounding of 8-bit codes q: q+8 for q >= 0, q+7 for q < 0, whose high nibbles are
 * the nearest multiples of 16, ties away from zero. In range, since |q| <= 112. */
KT_INLINE __m256i round_to_high_nibble(__m256i q) {
  const __m256i minus_one_below_zero = _mm256_cmpgt_epi8(_mm256_setzero_si256(), q);
  return _mm256_add_epi8(q, _mm256_add_epi8(_mm256_set1_epi8(8), minus_one_below_zero));
}

/* Low nibbles from the first 64 columns, high nibbles from the second. */
KT_INLINE __m256i tile_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                           int flush) {
  const __m256i first = round_to_high_nibble(kt_round32(row, k + j, inverse, form, flush));
  const __m256i second = round_to_high_nibble(kt_round32(row, k + 64 + j, inverse, form, flush));
  const __m256i low_nibble = _mm256_set1_epi8(0x0f);
  return _mm256_or_si256(_mm256_and_si256(low_nibble, _mm256_srli_epi16(first, 4)),
                         _mm256_andnot_si256(low_nibble, second));
}

KT_INLINE void half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to, int form,
                         int flush) {
  kt_half_tile_avx2(strip, k, inverse, to, form, flush, tile_row);
}

/* The same by one rounding, which is cut to -7..7. */
KT_INLINE __m256i nearest_tile_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                                   int flush) {
  const __m256i top = _mm256_set1_epi8(7), bottom = _mm256_set1_epi8(-7);
  const __m256i low_nibble = _mm256_set1_epi8(0x0f);
  __m256i first = kt_round32(row, k + j, inverse, form, flush);
  __m256i second = kt_round32(row, k + 64 + j, inverse, form, flush);
  first = _mm256_max_epi8(_mm256_min_epi8(first, top), bottom);
  second = _mm256_max_epi8(_mm256_min_epi8(second, top), bottom);
  return _mm256_or_si256(_mm256_and_si256(low_nibble, first),
                         _mm256_andnot_si256(low_nibble, _mm256_slli_epi16(second, 4)));
}

KT_INLINE void nearest_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,
                                 int form, int flush) {
  kt_half_tile_avx2(strip, k, inverse, to, form, flush, nearest_tile_row);
}

kt_status kt_int4_quantize_pack_avx2(const kt_layout *layout, const kt_matrix *m,
                                     const kt_choice *choice, uint8_t *packed, void *scale,
                                     float *scratch) {
  const kt_strip_rule rule = {KT_INT4_TILE_COLS,   KT_INT4_BLOCK_ROWS, 2,
                              KT_STRIP_LOOPS_AVX2, half_tile,          nearest_half_tile};
  return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);
}

KT_TARGET_END
#endif
