/* INT8 and INT4 on AVX2: the strips of strip_avx2.h. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../quantize/strip_avx2.h"
#include "int.h"

/* ---- INT8: one code in a byte ------------------------------------------------ */

KT_INLINE __m256i int8_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                           int flush) {
  return kt_round32(row, k + j, inverse, form, flush);
}

/* A rounding that reaches -127 at most; the saturating packs do not go beyond 127. */
KT_INLINE __m256i int8_nearest_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                                   int flush) {
  return _mm256_max_epi8(kt_round32(row, k + j, inverse, form, flush), _mm256_set1_epi8(-127));
}

KT_STRIP_PACKER(int8, KT_INT8, 1, avx2, KT_STRIP_LOOPS_AVX2)

/* ---- INT4: two codes in a byte ----------------------------------------------- */

/* Second rounding of 8-bit codes q: q+8 for q >= 0, q+7 for q < 0, whose high nibbles are
 * the nearest multiples of 16, ties away from zero. In range, since |q| <= 112. */
KT_INLINE __m256i round_to_high_nibble(__m256i q) {
  const __m256i minus_one_below_zero = _mm256_cmpgt_epi8(_mm256_setzero_si256(), q);
  return _mm256_add_epi8(q, _mm256_add_epi8(_mm256_set1_epi8(8), minus_one_below_zero));
}

/* Low nibbles from the first 64 columns, high nibbles from the second. */
KT_INLINE __m256i int4_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                           int flush) {
  const __m256i first = round_to_high_nibble(kt_round32(row, k + j, inverse, form, flush));
  const __m256i second = round_to_high_nibble(kt_round32(row, k + 64 + j, inverse, form, flush));
  const __m256i low_nibble = _mm256_set1_epi8(0x0f);
  return _mm256_or_si256(_mm256_and_si256(low_nibble, _mm256_srli_epi16(first, 4)),
                         _mm256_andnot_si256(low_nibble, second));
}

/* The same by one rounding, which is cut to -7..7. */
KT_INLINE __m256i int4_nearest_row(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
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

KT_STRIP_PACKER(int4, KT_INT4, 2, avx2, KT_STRIP_LOOPS_AVX2)

KT_TARGET_END
#endif
