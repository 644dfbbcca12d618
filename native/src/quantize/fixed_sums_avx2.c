/* Sums over the codes of a row for the search in fixed point on AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"
#include "fixed.h"

KT_TARGET_BEGIN(AVX2)

/* Sums of the words of a[0], ... a[3], each of 8 that together may have 33 bits. */
KT_INLINE __m256i totals(const __m256i *a) {
  const __m256i b =
      _mm256_add_epi32(_mm256_unpacklo_epi32(a[0], a[1]), _mm256_unpackhi_epi32(a[0], a[1]));
  const __m256i c =
      _mm256_add_epi32(_mm256_unpacklo_epi32(a[2], a[3]), _mm256_unpackhi_epi32(a[2], a[3]));
  const __m256i four = _mm256_add_epi32(_mm256_unpacklo_epi64(b, c), _mm256_unpackhi_epi64(b, c));
  return _mm256_add_epi64(_mm256_cvtepu32_epi64(_mm256_castsi256_si128(four)),
                          _mm256_cvtepu32_epi64(_mm256_extracti128_si256(four, 1)));
}

/* Columns of a block. */
KT_INLINE void add_block(const int16_t *row, int64_t cols, const int bits, const uint16_t *inverse,
                         const int count, __m256i *product, __m256i *square) {
  const kt_fixed_levels levels = kt_fixed_levels_of(bits);
  const __m256i bound = _mm256_set1_epi16((int16_t)levels.bound);
  const __m256i top = _mm256_set1_epi16((int16_t)levels.top);
  KT_UNROLL(4)
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) product[i] = square[i] = _mm256_setzero_si256();
  for (int64_t k = 0; k < cols; k += 16) {
    const __m256i m = _mm256_loadu_si256((const __m256i *)(const void *)(row + k));
    KT_UNROLL(4) for (int i = 0; i < count; i++) {
      const __m256i y = _mm256_mulhi_epu16(m, _mm256_set1_epi16((int16_t)inverse[i]));
      const __m256i left = _mm256_subs_epu16(bound, y);
      const __m256i below = bits == 4 ? _mm256_srli_epi16(left, 10) : _mm256_srli_epi16(left, 7);
      const __m256i c = _mm256_xor_si256(below, top); /* top - below: top has no zero bits */
      product[i] = _mm256_add_epi32(product[i], _mm256_madd_epi16(m, c));
      square[i] = _mm256_add_epi32(square[i], _mm256_madd_epi16(c, c));
    }
  }
}

KT_INLINE void sum_row(const int16_t *row, int64_t cols, const int bits, const uint16_t *inverse,
                       const int count, kt_fixed_sums *sums) {
  const int64_t most = bits == 4 ? KT_FIXED_BLOCK_4 : KT_FIXED_BLOCK_8;
  __m256i products = _mm256_setzero_si256(), squares = products;
  for (int64_t k = 0; k < cols; k += most) {
    __m256i product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
    const int64_t left = cols - k < most ? cols - k : most;
    add_block(row + k, left, bits, inverse, count, product, square);
    products = _mm256_add_epi64(products, totals(product));
    squares = _mm256_add_epi64(squares, totals(square));
  }
  int64_t product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
  _mm256_storeu_si256((__m256i *)(void *)product, products);
  _mm256_storeu_si256((__m256i *)(void *)square, squares);
  for (int i = 0; i < count; i++) sums[i] = (kt_fixed_sums){product[i], square[i]};
}

/* Functions of their own, so that sums get all registers. */
KT_NOINLINE void two(const int16_t *row, int64_t cols, const uint16_t *inverse,
                     kt_fixed_sums *sums) {
  sum_row(row, cols, 4, inverse, 2, sums);
}

KT_NOINLINE void four(const int16_t *row, int64_t cols, const uint16_t *inverse,
                      kt_fixed_sums *sums) {
  sum_row(row, cols, 4, inverse, 4, sums);
}

KT_NOINLINE void four_bytes(const int16_t *row, int64_t cols, const uint16_t *inverse,
                            kt_fixed_sums *sums) {
  sum_row(row, cols, 8, inverse, 4, sums);
}

void kt_fixed_sums_avx2(const int16_t *row, int64_t cols, int bits, const uint16_t *inverse,
                        int count, kt_fixed_sums *sums) {
  (bits == 8 ? four_bytes : count == 2 ? two : four)(row, cols, inverse, sums);
}

KT_TARGET_END
#endif
