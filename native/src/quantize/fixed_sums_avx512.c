/* Sums over the codes of a row for the search in fixed point on AVX-512, with VNNI or without. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"
#include "fixed.h"

KT_TARGET_BEGIN(AVX512)

/* sum + a * b, two products in a lane. */
typedef __m512i dot_fn(__m512i sum, __m512i a, __m512i b);

KT_INLINE __m512i dot_of(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

/* Sums of the words of a[0], ... a[3], each of 16 that together may have 34 bits. */
KT_INLINE __m256i totals(const __m512i *a) {
  const __m512i b =
      _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i c =
      _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(b, c), _mm512_unpackhi_epi64(b, c));
  const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(four));
  const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(four, 1));
  const __m512i two = _mm512_add_epi64(low, high);
  return _mm256_add_epi64(_mm512_castsi512_si256(two), _mm512_extracti64x4_epi64(two, 1));
}

/* Columns of a block. */
KT_INLINE void add_block(const int16_t *row, int64_t cols, const int bits, const uint16_t *inverse,
                         const int count, dot_fn *dot, __m512i *product, __m512i *square) {
  const kt_fixed_levels levels = kt_fixed_levels_of(bits);
  const __m512i bound = _mm512_set1_epi16((int16_t)levels.bound);
  const __m512i top = _mm512_set1_epi16((int16_t)levels.top);
  KT_UNROLL(4)
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) product[i] = square[i] = _mm512_setzero_si512();
  for (int64_t k = 0; k < cols; k += 32) {
    const __m512i m = _mm512_loadu_si512(row + k);
    KT_UNROLL(4) for (int i = 0; i < count; i++) {
      const __m512i y = _mm512_mulhi_epu16(m, _mm512_set1_epi16((int16_t)inverse[i]));
      const __m512i left = _mm512_subs_epu16(bound, y);
      const __m512i below = bits == 4 ? _mm512_srli_epi16(left, 10) : _mm512_srli_epi16(left, 7);
      const __m512i c = _mm512_xor_si512(below, top); /* top - below: top has no zero bits */
      product[i] = dot(product[i], m, c);
      square[i] = dot(square[i], c, c);
    }
  }
}

KT_INLINE void sum_row(const int16_t *row, int64_t cols, const int bits, const uint16_t *inverse,
                       const int count, dot_fn *dot, kt_fixed_sums *sums) {
  const int64_t most = bits == 4 ? KT_FIXED_BLOCK_4 : KT_FIXED_BLOCK_8;
  __m256i products = _mm256_setzero_si256(), squares = products;
  for (int64_t k = 0; k < cols; k += most) {
    __m512i product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
    const int64_t left = cols - k < most ? cols - k : most;
    add_block(row + k, left, bits, inverse, count, dot, product, square);
    products = _mm256_add_epi64(products, totals(product));
    squares = _mm256_add_epi64(squares, totals(square));
  }
  int64_t product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
  _mm256_storeu_si256((__m256i *)(void *)product, products);
  _mm256_storeu_si256((__m256i *)(void *)square, squares);
  for (int i = 0; i < count; i++) sums[i] = (kt_fixed_sums){product[i], square[i]};
}

/* Functions of their own, so that sums get all registers. */
#define FIXED_SUMS(level, dot)                                                                     \
  KT_NOINLINE void two_##level(const int16_t *row, int64_t cols, const uint16_t *inverse,          \
                               kt_fixed_sums *sums) {                                              \
    sum_row(row, cols, 4, inverse, 2, dot, sums);                                                  \
  }                                                                                                \
  KT_NOINLINE void four_##level(const int16_t *row, int64_t cols, const uint16_t *inverse,         \
                                kt_fixed_sums *sums) {                                             \
    sum_row(row, cols, 4, inverse, 4, dot, sums);                                                  \
  }                                                                                                \
  KT_NOINLINE void four_bytes_##level(const int16_t *row, int64_t cols, const uint16_t *inverse,   \
                                      kt_fixed_sums *sums) {                                       \
    sum_row(row, cols, 8, inverse, 4, dot, sums);                                                  \
  }                                                                                                \
  void kt_fixed_sums_##level(const int16_t *row, int64_t cols, int bits, const uint16_t *inverse,  \
                             int count, kt_fixed_sums *sums) {                                     \
    (bits == 8    ? four_bytes_##level                                                             \
     : count == 2 ? two_##level                                                                    \
                  : four_##level)(row, cols, inverse, sums);                                       \
  }

FIXED_SUMS(avx512, dot_of)
KT_TARGET_END

KT_TARGET_BEGIN(AVX512_VNNI)
KT_INLINE __m512i dot_of_vnni(__m512i sum, __m512i a, __m512i b) {
  return _mm512_dpwssd_epi32(sum, a, b);
}

FIXED_SUMS(vnni, dot_of_vnni)
KT_TARGET_END
#endif
