/* strip_avx2.h - the loops inside a strip (strip.h) on AVX2: row maxima, 32 columns of 8-bit
 * codes, and half a tile in four transposes of 8x8 words. */
#ifndef KT_STRIP_AVX2_H
#define KT_STRIP_AVX2_H

#include "../simd/transpose_avx2.h"
#include "fixed_avx2.h"
#include "search_avx2.h"
#include "strip.h"

KT_INLINE __m256i kt_load256(const uint8_t *at) {
  return _mm256_loadu_si256((const __m256i *)(const void *)at);
}

KT_INLINE uint32_t kt_row_max_avx2(const uint8_t *row, int64_t cols, int form) {
  const __m256i magnitude = _mm256_set1_epi32(form == KT_ROW_BF16 ? 0x7fff7fff : 0x7fffffff);
  __m256i max0 = _mm256_setzero_si256(), max1 = max0;
  for (int64_t at = 0; at < cols * (form == KT_ROW_BF16 ? 2 : 4); at += 64) {
    const __m256i low = _mm256_and_si256(kt_load256(row + at), magnitude);
    const __m256i high = _mm256_and_si256(kt_load256(row + at + 32), magnitude);
    max0 = form == KT_ROW_BF16 ? _mm256_max_epu16(max0, low) : _mm256_max_epu32(max0, low);
    max1 = form == KT_ROW_BF16 ? _mm256_max_epu16(max1, high) : _mm256_max_epu32(max1, high);
  }
  uint32_t words[16], max = 0;
  _mm256_storeu_si256((__m256i *)(void *)words, max0);
  _mm256_storeu_si256((__m256i *)(void *)(words + 8), max1);
  for (int i = 0; i < 16; i++) {
    const uint32_t low = words[i] << 16, high = words[i] & 0xffff0000u;
    const uint32_t most = form == KT_ROW_F32 ? words[i] : low > high ? low : high;
    max = most > max ? most : max;
  }
  return max;
}

/* 8 values to 32-bit codes: one product, one rounding to even (kt_float_mode_enter). */
KT_INLINE __m256i kt_round8(__m256i bits, __m256 inverse, int flush) {
  if (flush) {
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    bits = _mm256_and_si256(bits, _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x007fffff)));
  }
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(bits), inverse));
}

/* 32 columns of a row from column k on as int8 codes. The saturating packs interleave the
 * quarters of a vector: word j of 128-bit lane l holds the four columns of group
 * kt_group8(form, l, j). */
KT_INLINE __m256i kt_round32(const uint8_t *row, int64_t k, __m256 inverse, int form, int flush) {
  __m256i a, b, c, d;
  if (form == KT_ROW_BF16) {
    const __m256i zero = _mm256_setzero_si256();
    const __m256i low = kt_load256(row + 2 * k), high = kt_load256(row + 2 * k + 32);
    a = _mm256_unpacklo_epi16(zero, low), b = _mm256_unpackhi_epi16(zero, low);
    c = _mm256_unpacklo_epi16(zero, high), d = _mm256_unpackhi_epi16(zero, high);
  } else {
    a = kt_load256(row + 4 * k), b = kt_load256(row + 4 * k + 32);
    c = kt_load256(row + 4 * k + 64), d = kt_load256(row + 4 * k + 96);
  }
  a = kt_round8(a, inverse, flush), b = kt_round8(b, inverse, flush);
  c = kt_round8(c, inverse, flush), d = kt_round8(d, inverse, flush);
  return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
}

KT_INLINE int kt_group8(int form, int lane, int word) {
  return form == KT_ROW_BF16 ? word / 2 * 4 + 2 * lane + word % 2 : 2 * word + lane;
}

/* Bytes j..j+31 of a row of a tile that begins at column k, in the order of kt_round32. */
typedef __m256i kt_tile_row_fn(const uint8_t *row, int64_t k, int j, __m256 inverse, int form,
                               int flush);

KT_INLINE void kt_half_tile_avx2(kt_strip strip, int64_t k, const float *inverse,
                                 uint8_t *half_tile, int form, int flush,
                                 kt_tile_row_fn *tile_row) {
  for (int r = 0; r < KT_STRIP_ROWS; r += 8)
    for (int j = 0; j < KT_GROUP_STRIDE; j += 32) {
      __m256i row[8], column[8];
      for (int i = 0; i < 8; i++)
        row[i] = tile_row(strip.data + (r + i) * strip.row_size, k, j,
                          _mm256_set1_ps(inverse[r + i]), form, flush);
      kt_transpose8(row, column);
      for (int i = 0; i < 8; i++) {
        const int group = j / 4 + kt_group8(form, i / 4, i % 4);
        _mm256_storeu_si256((__m256i *)(void *)(half_tile + group * KT_GROUP_STRIDE + 4 * r),
                            column[i]);
      }
    }
}

#define KT_STRIP_LOOPS_AVX2                                                                        \
  {kt_decode_rows_avx2, kt_row_max_avx2, kt_magnitudes_avx2, kt_code_sums_avx2, kt_fixed_row_avx2}

#endif
