/* INT4 on AVX-512: the strips of strip_avx512.h, two codes per byte. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../quantize/strip_avx512.h"
#include "int4.h"

enum { SELECT = 0xca }; /* bits of the second operand where the first has ones, else the third */

/* Second rounding of 8-bit codes q: q+8 for q >= 0, q+7 for q < 0, whose high nibbles are
 * the nearest multiples of 16, ties away from zero. In range, since |q| <= 112. */
KT_INLINE __m512i round_to_high_nibble(__m512i q) {
  const __m512i seven_or_eight =
      _mm512_mask_blend_epi8(_mm512_movepi8_mask(q), _mm512_set1_epi8(8), _mm512_set1_epi8(7));
  return _mm512_add_epi8(q, seven_or_eight);
}

/* Low nibbles from the first 64 columns, high nibbles from the second. */
KT_INLINE __m512i round_tile_row(const uint8_t *row, int64_t k, __m512 inverse, int form,
                                 int flush) {
  const __m512i first = round_to_high_nibble(kt_round64(row, k, inverse, form, flush));
  const __m512i second = round_to_high_nibble(kt_round64(row, k + 64, inverse, form, flush));
  const __m512i low_nibble = _mm512_set1_epi8(0x0f);
  return _mm512_ternarylogic_epi64(low_nibble, _mm512_srli_epi16(first, 4), second, SELECT);
}

KT_INLINE void half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to, int form,
                         int flush) {
  kt_half_tile_avx512(strip, k, inverse, to, form, flush, round_tile_row);
}

/* The same by one rounding, which is cut to -7..7. */
KT_INLINE __m512i nearest_tile_row(const uint8_t *row, int64_t k, __m512 inverse, int form,
                                   int flush) {
  const __m512i top = _mm512_set1_epi8(7), bottom = _mm512_set1_epi8(-7);
  __m512i first = kt_round64(row, k, inverse, form, flush);
  __m512i second = kt_round64(row, k + 64, inverse, form, flush);
  first = _mm512_max_epi8(_mm512_min_epi8(first, top), bottom);
  second = _mm512_max_epi8(_mm512_min_epi8(second, top), bottom);
  const __m512i low_nibble = _mm512_set1_epi8(0x0f);
  return _mm512_ternarylogic_epi64(low_nibble, first, _mm512_slli_epi16(second, 4), SELECT);
}

KT_INLINE void nearest_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,
                                 int form, int flush) {
  kt_half_tile_avx512(strip, k, inverse, to, form, flush, nearest_tile_row);
}

kt_status kt_int4_quantize_pack_avx512(const kt_layout *layout, const kt_matrix *m,
                                       const kt_choice *choice, uint8_t *packed, void *scale,
                                       float *scratch) {
  const kt_strip_rule rule = {KT_INT4_TILE_COLS,     KT_INT4_BLOCK_ROWS, 2,
                              KT_STRIP_LOOPS_AVX512, half_tile,          nearest_half_tile};
  return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);
}

KT_TARGET_END
#endif
