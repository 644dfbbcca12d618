/* INT8 and INT4 on AVX-512: the strips of strip_avx512.h. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../quantize/strip_avx512.h"
#include "int.h"

/* ---- INT8: one code in a byte ------------------------------------------------ */

KT_INLINE __m512i int8_row(const uint8_t *row, int64_t k, __m512 inverse, int form, int flush) {
  return kt_round64(row, k, inverse, form, flush);
}

/* A rounding that reaches -127 at most; the saturating packs do not go beyond 127. */
KT_INLINE __m512i int8_nearest_row(const uint8_t *row, int64_t k, __m512 inverse, int form,
                                   int flush) {
  return _mm512_max_epi8(kt_round64(row, k, inverse, form, flush), _mm512_set1_epi8(-127));
}

KT_STRIP_PACKER(int8, KT_INT8, 1, avx512, KT_STRIP_LOOPS_AVX512)

/* ---- INT4: two codes in a byte ----------------------------------------------- */

enum { SELECT = 0xca }; /* bits of the second operand where the first has ones, else the third */

/* Second rounding of 8-bit codes q: q+8 for q >= 0, q+7 for q < 0, whose high nibbles are
 * the nearest multiples of 16, ties away from zero. In range, since |q| <= 112. */
KT_INLINE __m512i round_to_high_nibble(__m512i q) {
  const __m512i seven_or_eight =
      _mm512_mask_blend_epi8(_mm512_movepi8_mask(q), _mm512_set1_epi8(8), _mm512_set1_epi8(7));
  return _mm512_add_epi8(q, seven_or_eight);
}

/* Low nibbles from the first 64 columns, high nibbles from the second. */
KT_INLINE __m512i int4_row(const uint8_t *row, int64_t k, __m512 inverse, int form, int flush) {
  const __m512i first = round_to_high_nibble(kt_round64(row, k, inverse, form, flush));
  const __m512i second = round_to_high_nibble(kt_round64(row, k + 64, inverse, form, flush));
  const __m512i low_nibble = _mm512_set1_epi8(0x0f);
  return _mm512_ternarylogic_epi64(low_nibble, _mm512_srli_epi16(first, 4), second, SELECT);
}

/* The same by one rounding, which is cut to -7..7. */
KT_INLINE __m512i int4_nearest_row(const uint8_t *row, int64_t k, __m512 inverse, int form,
                                   int flush) {
  const __m512i top = _mm512_set1_epi8(7), bottom = _mm512_set1_epi8(-7);
  __m512i first = kt_round64(row, k, inverse, form, flush);
  __m512i second = kt_round64(row, k + 64, inverse, form, flush);
  first = _mm512_max_epi8(_mm512_min_epi8(first, top), bottom);
  second = _mm512_max_epi8(_mm512_min_epi8(second, top), bottom);
  const __m512i low_nibble = _mm512_set1_epi8(0x0f);
  return _mm512_ternarylogic_epi64(low_nibble, first, _mm512_slli_epi16(second, 4), SELECT);
}

KT_STRIP_PACKER(int4, KT_INT4, 2, avx512, KT_STRIP_LOOPS_AVX512)

KT_TARGET_END
#endif
