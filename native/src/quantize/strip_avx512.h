/* strip_avx512.h - the loops inside a strip (strip.h) on AVX-512: row maxima, 64 columns of
 * 8-bit codes, and half a tile in one transpose of 16x16 words. */
#ifndef KT_STRIP_AVX512_H
#define KT_STRIP_AVX512_H

#include "../simd/transpose_avx512.h"
#include "fixed_avx512.h"
#include "search_avx512.h"
#include "strip.h"

KT_INLINE uint32_t kt_row_max_avx512(const uint8_t *row, int64_t cols, int form) {
  const int64_t size = cols * (form == KT_ROW_BF16 ? 2 : 4);
  __m512i max0 = _mm512_setzero_si512(), max1 = max0;
  if (form == KT_ROW_BF16) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (int64_t at = 0; at < size; at += 128) {
      max0 = _mm512_max_epu16(max0, _mm512_and_si512(_mm512_loadu_si512(row + at), magnitude));
      max1 = _mm512_max_epu16(max1, _mm512_and_si512(_mm512_loadu_si512(row + at + 64), magnitude));
    }
    max0 = _mm512_max_epu16(max0, max1);
    const __m512i high = _mm512_and_si512(max0, _mm512_set1_epi32((int)0xffff0000u));
    return _mm512_reduce_max_epu32(_mm512_max_epu32(high, _mm512_slli_epi32(max0, 16)));
  }
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t at = 0; at < size; at += 128) {
    max0 = _mm512_max_epu32(max0, _mm512_and_si512(_mm512_loadu_si512(row + at), magnitude));
    max1 = _mm512_max_epu32(max1, _mm512_and_si512(_mm512_loadu_si512(row + at + 64), magnitude));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(max0, max1));
}

/* 16 values to 32-bit codes: one product, one rounding to even. With `flush`, denormal
 * values count as zero. */
KT_INLINE __m512i kt_round16(__m512i bits, __m512 inverse, int flush) {
  __m512 value = _mm512_castsi512_ps(bits);
  if (flush) {
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 normal = _mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    value = _mm512_maskz_mov_ps(normal, value);
  }
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  return _mm512_cvt_roundps_epi32(_mm512_mul_round_ps(value, inverse, NEAREST), NEAREST);
}

/* 64 columns of a row from column k on as int8 codes. The saturating packs interleave the
 * four quarters of a vector, so that word j of 128-bit lane l holds the four columns of
 * group kt_group(form, l, j): the transpose below puts that right at no cost. */
KT_INLINE __m512i kt_round64(const uint8_t *row, int64_t k, __m512 inverse, int form, int flush) {
  __m512i a, b, c, d;
  if (form == KT_ROW_BF16) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low = _mm512_loadu_si512(row + 2 * k);
    const __m512i high = _mm512_loadu_si512(row + 2 * k + 64);
    a = _mm512_unpacklo_epi16(zero, low), b = _mm512_unpackhi_epi16(zero, low);
    c = _mm512_unpacklo_epi16(zero, high), d = _mm512_unpackhi_epi16(zero, high);
  } else {
    a = _mm512_loadu_si512(row + 4 * k), b = _mm512_loadu_si512(row + 4 * k + 64);
    c = _mm512_loadu_si512(row + 4 * k + 128), d = _mm512_loadu_si512(row + 4 * k + 192);
  }
  a = kt_round16(a, inverse, flush), b = kt_round16(b, inverse, flush);
  c = kt_round16(c, inverse, flush), d = kt_round16(d, inverse, flush);
  return _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

KT_INLINE int kt_group(int form, int lane, int word) {
  return form == KT_ROW_BF16 ? word / 2 * 8 + 2 * lane + word % 2 : 4 * word + lane;
}

/* Stores word (lane, j) of all 16 rows, in row order, as group kt_group(form, lane, j) of
 * the half tile at `to`. */
KT_INLINE void kt_store_transposed(const __m512i row[16], uint8_t *to, int form) {
  __m512i column[16];
  kt_transpose16(row, column);
  for (int lane = 0; lane < 4; lane++)
    for (int j = 0; j < 4; j++)
      _mm512_storeu_si512(to + KT_GROUP_STRIDE * kt_group(form, lane, j), column[4 * lane + j]);
}

/* One row of one tile, from column k on, as 64 bytes in the order of kt_round64. */
typedef __m512i kt_tile_row_fn(const uint8_t *row, int64_t k, __m512 inverse, int form, int flush);

KT_INLINE void kt_half_tile_avx512(kt_strip strip, int64_t k, const float *inverse,
                                   uint8_t *half_tile, int form, int flush,
                                   kt_tile_row_fn *tile_row) {
  __m512i bytes[KT_STRIP_ROWS];
  for (int r = 0; r < KT_STRIP_ROWS; r++)
    bytes[r] =
        tile_row(strip.data + r * strip.row_size, k, _mm512_set1_ps(inverse[r]), form, flush);
  kt_store_transposed(bytes, half_tile, form);
}

#define KT_STRIP_LOOPS_AVX512                                                                      \
  {kt_decode_rows_avx512, kt_row_max_avx512, kt_magnitudes_avx512, kt_code_sums_avx512,            \
   kt_fixed_row_avx512}

#endif
