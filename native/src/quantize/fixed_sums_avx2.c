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

KT_INLINE __m256i load16(const int16_t *m) {
  return _mm256_loadu_si256((const __m256i *)(const void *)m);
}

/* How far the codes of 16 columns are below the top. */
KT_INLINE __m256i below_top(__m256i m, const int bits, uint16_t inverse) {
  const __m256i bound = _mm256_set1_epi16((int16_t)kt_fixed_levels_of(bits).bound);
  const __m256i y = _mm256_mulhi_epu16(m, _mm256_set1_epi16((int16_t)inverse));
  const __m256i left = _mm256_subs_epu16(bound, y);
  return bits == 4 ? _mm256_srli_epi16(left, 10) : _mm256_srli_epi16(left, 7);
}

/* INT4, of b = 7 - c: sum m c = 7 sum m - sum m b, and the b of two steps side by side in bytes
 * have their c^2 by a look-up, of which a byte holds five. */
KT_INLINE void add_block_4(const int16_t *row, int64_t cols, const uint16_t *inverse,
                           const int count, __m256i *cut, __m256i *square) {
  const __m256i squares = _mm256_setr_epi8(49, 36, 25, 16, 9, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 49,
                                           36, 25, 16, 9, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) cut[i] = _mm256_setzero_si256();
  for (int64_t k = 0; k < cols; k += 64) {
    __m256i bytes[KT_FIXED_AT_ONCE / 2];
    KT_UNROLL(2) for (int i = 0; i < count / 2; i++) bytes[i] = _mm256_setzero_si256();
    KT_UNROLL(4) for (int64_t at = k; at < k + 64; at += 16) {
      const __m256i m = load16(row + at);
      KT_UNROLL(2) for (int i = 0; i < count; i += 2) {
        const __m256i a = below_top(m, 4, inverse[i]), b = below_top(m, 4, inverse[i + 1]);
        cut[i] = _mm256_add_epi32(cut[i], _mm256_madd_epi16(m, a));
        cut[i + 1] = _mm256_add_epi32(cut[i + 1], _mm256_madd_epi16(m, b));
        const __m256i both = _mm256_shuffle_epi8(squares, _mm256_packus_epi16(a, b));
        bytes[i / 2] = _mm256_add_epi8(bytes[i / 2], both);
      }
    }
    KT_UNROLL(2)
    for (int i = 0; i < count / 2; i++)
      square[i] = _mm256_add_epi64(square[i], _mm256_sad_epu8(bytes[i], _mm256_setzero_si256()));
  }
}

KT_INLINE void sum_row_4(const kt_fixed_row *row, const uint16_t *inverse, const int count,
                         kt_fixed_sums *sums) {
  __m256i cuts = _mm256_setzero_si256(), square[KT_FIXED_AT_ONCE / 2] = {cuts, cuts};
  for (int64_t k = 0; k < row->cols; k += KT_FIXED_BLOCK_4) {
    __m256i cut[KT_FIXED_AT_ONCE];
    const int64_t left = row->cols - k < KT_FIXED_BLOCK_4 ? row->cols - k : KT_FIXED_BLOCK_4;
    add_block_4(row->m + k, left, inverse, count, cut, square);
    cuts = _mm256_add_epi64(cuts, totals(cut));
  }
  int64_t cut[KT_FIXED_AT_ONCE], squares[KT_FIXED_AT_ONCE];
  _mm256_storeu_si256((__m256i *)(void *)cut, cuts);
  for (int i = 0; i < KT_FIXED_AT_ONCE / 2; i++) {
    const __m128i high = _mm256_extracti128_si256(square[i], 1);
    _mm_storeu_si128((__m128i *)(void *)(squares + 2 * i),
                     _mm_add_epi64(_mm256_castsi256_si128(square[i]), high));
  }
  for (int i = 0; i < count; i++) sums[i] = (kt_fixed_sums){7 * row->sum - cut[i], squares[i]};
}

/* INT8, four steps. */
KT_INLINE void add_block_8(const int16_t *row, int64_t cols, const uint16_t *inverse,
                           __m256i *product, __m256i *square) {
  const __m256i top = _mm256_set1_epi16(127);
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) product[i] = square[i] = _mm256_setzero_si256();
  for (int64_t k = 0; k < cols; k += 16) {
    const __m256i m = load16(row + k);
    KT_UNROLL(4) for (int i = 0; i < KT_FIXED_AT_ONCE; i++) {
      const __m256i c = _mm256_xor_si256(below_top(m, 8, inverse[i]), top); /* its bits are ones */
      product[i] = _mm256_add_epi32(product[i], _mm256_madd_epi16(m, c));
      square[i] = _mm256_add_epi32(square[i], _mm256_madd_epi16(c, c));
    }
  }
}

/* Functions of their own, so that sums get all registers. */
KT_NOINLINE void two(const kt_fixed_row *row, const uint16_t *inverse, kt_fixed_sums *sums) {
  sum_row_4(row, inverse, 2, sums);
}

KT_NOINLINE void four(const kt_fixed_row *row, const uint16_t *inverse, kt_fixed_sums *sums) {
  sum_row_4(row, inverse, 4, sums);
}

KT_NOINLINE void four_bytes(const kt_fixed_row *row, const uint16_t *inverse, kt_fixed_sums *sums) {
  __m256i products = _mm256_setzero_si256(), squares = products;
  for (int64_t k = 0; k < row->cols; k += KT_FIXED_BLOCK_8) {
    __m256i product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
    const int64_t left = row->cols - k < KT_FIXED_BLOCK_8 ? row->cols - k : KT_FIXED_BLOCK_8;
    add_block_8(row->m + k, left, inverse, product, square);
    products = _mm256_add_epi64(products, totals(product));
    squares = _mm256_add_epi64(squares, totals(square));
  }
  int64_t product[KT_FIXED_AT_ONCE], square[KT_FIXED_AT_ONCE];
  _mm256_storeu_si256((__m256i *)(void *)product, products);
  _mm256_storeu_si256((__m256i *)(void *)square, squares);
  for (int i = 0; i < KT_FIXED_AT_ONCE; i++) sums[i] = (kt_fixed_sums){product[i], square[i]};
}

void kt_fixed_sums_avx2(const kt_fixed_row *row, int bits, const uint16_t *inverse, int count,
                        kt_fixed_sums *sums) {
  (bits == 8 ? four_bytes : count == 2 ? two : four)(row, inverse, sums);
}

KT_TARGET_END
#endif
