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

/* sum + the squares of 7 - b, of bytes b: in the lower 64 bits of each 128 apart from the upper. */
typedef __m512i squares_fn(__m512i sum, __m512i b);

KT_INLINE __m512i squares_of(__m512i sum, __m512i b) {
  const __m512i squares =
      _mm512_broadcast_i32x4(_mm_setr_epi8(49, 36, 25, 16, 9, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m512i each = _mm512_shuffle_epi8(squares, b);
  return _mm512_add_epi64(sum, _mm512_sad_epu8(each, _mm512_setzero_si512()));
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

/* Of the words of a and of b: sums of those in lower 64 bits of 128, a's and b's, and in upper
 * ones.
 */
KT_INLINE __m128i halves(__m512i a, __m512i b) {
  const __m512 low = _mm512_castsi512_ps(_mm512_unpacklo_epi64(a, b));
  const __m512 high = _mm512_castsi512_ps(_mm512_unpackhi_epi64(a, b));
  const __m512i even = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88));
  const __m512i odd = _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xdd));
  const __m512i sum = _mm512_add_epi32(even, odd);
  const __m256i four =
      _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
}

/* How far the codes of 32 columns are below the top. */
KT_INLINE __m512i below_top(__m512i m, const int bits, uint16_t inverse) {
  const __m512i bound = _mm512_set1_epi16((int16_t)kt_fixed_levels_of(bits).bound);
  const __m512i y = _mm512_mulhi_epu16(m, _mm512_set1_epi16((int16_t)inverse));
  const __m512i left = _mm512_subs_epu16(bound, y);
  return bits == 4 ? _mm512_srli_epi16(left, 10) : _mm512_srli_epi16(left, 7);
}

/* INT4, of b = 7 - c: sum m c = 7 sum m - sum m b, and the b of two steps are side by side in
 * bytes.
 */
KT_INLINE void add_block_4(const int16_t *row, int64_t cols, const uint16_t *inverse,
                           const int count, dot_fn *dot, squares_fn *add, __m512i *cut,
                           __m512i *square) {
  KT_UNROLL(4) for (int i = 0; i < KT_FIXED_AT_ONCE; i++) cut[i] = _mm512_setzero_si512();
  square[0] = square[1] = _mm512_setzero_si512();
  for (int64_t k = 0; k < cols; k += 32) {
    const __m512i m = _mm512_loadu_si512(row + k);
    KT_UNROLL(2) for (int i = 0; i < count; i += 2) {
      const __m512i a = below_top(m, 4, inverse[i]), b = below_top(m, 4, inverse[i + 1]);
      cut[i] = dot(cut[i], m, a);
      cut[i + 1] = dot(cut[i + 1], m, b);
      square[i / 2] = add(square[i / 2], _mm512_packus_epi16(a, b));
    }
  }
}

KT_INLINE void sum_row_4(const kt_fixed_row *row, const uint16_t *inverse, const int count,
                         dot_fn *dot, squares_fn *add, kt_fixed_sums *sums) {
  for (int i = 0; i < count; i++) sums[i] = (kt_fixed_sums){7 * row->sum, 0};
  for (int64_t k = 0; k < row->cols; k += KT_FIXED_BLOCK_4) {
    __m512i cut[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE / 2];
    int64_t cuts[KT_FIXED_AT_ONCE];
    int32_t squares[KT_FIXED_AT_ONCE]; /* of steps 0, 2, 1, 3 */
    const int64_t left = row->cols - k < KT_FIXED_BLOCK_4 ? row->cols - k : KT_FIXED_BLOCK_4;
    add_block_4(row->m + k, left, inverse, count, dot, add, cut, square);
    _mm256_storeu_si256((__m256i *)(void *)cuts, totals(cut));
    _mm_storeu_si128((__m128i *)(void *)squares, halves(square[0], square[1]));
    for (int i = 0; i < count; i++) {
      sums[i].product -= cuts[i];
      sums[i].square += squares[i / 2 + i % 2 * 2];
    }
  }
}

/* INT8, four steps. */
KT_INLINE void add_block_8(const int16_t *row, int64_t cols, const uint16_t *inverse, dot_fn *dot,
                           __m512i *product, __m512i *square) {
  const __m512i top = _mm512_set1_epi16(127);
  KT_UNROLL(4)
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) product[i] = square[i] = _mm512_setzero_si512();
  for (int64_t k = 0; k < cols; k += 32) {
    const __m512i m = _mm512_loadu_si512(row + k);
    KT_UNROLL(4) for (int i = 0; i < KT_FIXED_AT_ONCE; i++) {
      const __m512i c = _mm512_xor_si512(below_top(m, 8, inverse[i]), top); /* its bits are ones */
      product[i] = dot(product[i], m, c);
      square[i] = dot(square[i], c, c);
    }
  }
}

KT_INLINE void sum_row_8(const kt_fixed_row *row, const uint16_t *inverse, dot_fn *dot,
                         kt_fixed_sums *sums) {
  __m256i products = _mm256_setzero_si256(), squares = products;
  for (int64_t k = 0; k < row->cols; k += KT_FIXED_BLOCK_8) {
    __m512i product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
    const int64_t left = row->cols - k < KT_FIXED_BLOCK_8 ? row->cols - k : KT_FIXED_BLOCK_8;
    add_block_8(row->m + k, left, inverse, dot, product, square);
    products = _mm256_add_epi64(products, totals(product));
    squares = _mm256_add_epi64(squares, totals(square));
  }
  int64_t product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
  _mm256_storeu_si256((__m256i *)(void *)product, products);
  _mm256_storeu_si256((__m256i *)(void *)square, squares);
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) sums[i] = (kt_fixed_sums){product[i], square[i]};
}

/* Functions of their own, so that sums get all registers. */
#define FIXED_SUMS(level, dot, add)                                                                \
  KT_NOINLINE void two_##level(const kt_fixed_row *row, const uint16_t *inverse,                   \
                               kt_fixed_sums *sums) {                                              \
    sum_row_4(row, inverse, 2, dot, add, sums);                                                    \
  }                                                                                                \
  KT_NOINLINE void four_##level(const kt_fixed_row *row, const uint16_t *inverse,                  \
                                kt_fixed_sums *sums) {                                             \
    sum_row_4(row, inverse, 4, dot, add, sums);                                                    \
  }                                                                                                \
  KT_NOINLINE void four_bytes_##level(const kt_fixed_row *row, const uint16_t *inverse,            \
                                      kt_fixed_sums *sums) {                                       \
    sum_row_8(row, inverse, dot, sums);                                                            \
  }                                                                                                \
  void kt_fixed_sums_##level(const kt_fixed_row *row, int bits, const uint16_t *inverse,           \
                             int count, kt_fixed_sums *sums) {                                     \
    (bits == 8    ? four_bytes_##level                                                             \
     : count == 2 ? two_##level                                                                    \
                  : four_##level)(row, inverse, sums);                                             \
  }

FIXED_SUMS(avx512, dot_of, squares_of)
KT_TARGET_END

KT_TARGET_BEGIN(AVX512_VNNI)
KT_INLINE __m512i dot_of_vnni(__m512i sum, __m512i a, __m512i b) {
  return _mm512_dpwssd_epi32(sum, a, b);
}

KT_INLINE __m512i squares_of_vnni(__m512i sum, __m512i b) {
  const __m512i c = _mm512_xor_si512(b, _mm512_set1_epi8(7));
  return _mm512_dpbusd_epi32(sum, c, c);
}

FIXED_SUMS(vnni, dot_of_vnni, squares_of_vnni)
KT_TARGET_END
#endif
