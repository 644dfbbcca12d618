/* Strips of plain matrices, and scaling of activations, with AVX-512; the same bits as strips.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "strips.h"

#include <float.h>
#include <math.h>

/* Which of 32 columns from `col` on a matrix has. */
static __mmask32 columns_there(const kt_plain *m, int64_t col) {
  const int64_t left = m->cols - col;
  const uint32_t above = left >= 32 ? 0 : left > 0 ? ~0u << left : ~0u;
  const uint32_t below = col >= 0 ? 0 : col > -32 ? ~(~0u << -col) : ~0u;
  return ~(above | below);
}

/* The upper halves of 32 words. */
KT_INLINE __m512i upper_halves(__m512i low, __m512i high) {
  return _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(low, 16))),
      _mm512_cvtepi32_epi16(_mm512_srli_epi32(high, 16)), 1);
}

/* Nearest bf16 in the upper half, ties to even; a NaN stays a NaN. */
KT_INLINE __m512i rounded(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x00400000));
}

/* The columns behind those, for the next strip. */
KT_INLINE void prefetch_next(const int dtype, const kt_plain *m, int64_t row, int64_t col) {
  const uintptr_t size = dtype == KT_BF16 ? 2 : 4;
  const uintptr_t at = (uintptr_t)m->data + (uintptr_t)(row * m->cols + col + KT_STRIP) * size;
  if (row >= 0 && row < m->rows) __builtin_prefetch((const void *)at, 0, 2);
}

/* 32 bf16 numbers of a row, from column `col` on, which may lie outside; 0 where `there` says so
 * and where there is no such row. */
KT_INLINE __m512i load_row(const int dtype, const kt_plain *m, int64_t row, int64_t col,
                           __mmask32 there) {
  if (row < 0 || row >= m->rows) return _mm512_setzero_si512();
  const uintptr_t at = (uintptr_t)(row * m->cols + col);
  if (dtype == KT_BF16)
    return _mm512_maskz_loadu_epi16(there, (const void *)((uintptr_t)m->data + at * 2));
  const uintptr_t from = (uintptr_t)m->data + at * 4;
  const __m512 low = _mm512_maskz_loadu_ps((__mmask16)there, (const void *)from);
  const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(there >> 16), (const void *)(from + 64));
  return upper_halves(rounded(low), rounded(high));
}

KT_INLINE void rows_of(const int dtype, const kt_plain *m, int64_t first, int64_t shift,
                       int64_t count, uint8_t *strip) {
  for (int64_t k = 0; k < count; k += KT_TILE_COLS, strip += KT_BF16_TILE) {
    const __mmask32 there = columns_there(m, k - shift);
    for (int half = 0; half < 2; half++) {
      __m512i row[KT_HALF_ROWS], pair[KT_HALF_ROWS];
      for (int r = 0; r < KT_HALF_ROWS; r++)
        row[r] = load_row(dtype, m, first + half * KT_HALF_ROWS + r, k - shift, there);
      kt_transpose16(row, pair);
      for (int q = 0; q < KT_HALF_ROWS; q++)
        _mm512_store_si512(strip + half * KT_BF16_HALF_TILE + q * KT_LINE, pair[q]);
    }
  }
}

KT_INLINE void columns_of(const int dtype, const kt_plain *m, int64_t first, int64_t shift,
                          int64_t count, uint8_t *strip) {
  const __m512i step = _mm512_set1_epi32(0x00010001), second = _mm512_set1_epi32(0x00200000);
  const __m512i ascending = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  /* Columns 0 to 15, and 16 to 31, of the one row and the other in turn. */
  const __m512i order0 = _mm512_add_epi32(_mm512_mullo_epi32(ascending, step), second);
  const __m512i order1 = _mm512_add_epi32(order0, _mm512_set1_epi32(0x00100010));
  const __mmask32 there = columns_there(m, first);
  for (int64_t k = 0; k < count; k += KT_TILE_COLS, strip += KT_BF16_TILE)
    for (int q = 0; q < KT_TILE_COLS / 2; q++) {
      const int64_t row = k + 2 * q - shift;
      const __m512i row0 = load_row(dtype, m, row, first, there);
      const __m512i row1 = load_row(dtype, m, row + 1, first, there);
      prefetch_next(dtype, m, row, first);
      prefetch_next(dtype, m, row + 1, first);
      kt_store_lines(strip, q, _mm512_permutex2var_epi16(row0, order0, row1),
                     _mm512_permutex2var_epi16(row0, order1, row1));
    }
}

static void rows(const kt_plain *m, int64_t first, int64_t shift, int64_t count, uint8_t *strip) {
  if (m->dtype == KT_BF16)
    rows_of(KT_BF16, m, first, shift, count, strip);
  else
    rows_of(KT_F32, m, first, shift, count, strip);
}

static void columns(const kt_plain *m, int64_t first, int64_t shift, int64_t count,
                    uint8_t *strip) {
  if (m->dtype == KT_BF16)
    columns_of(KT_BF16, m, first, shift, count, strip);
  else
    columns_of(KT_F32, m, first, shift, count, strip);
}

KT_INLINE __m512 scaled(const uint16_t *row, const float *scale) {
  const __m256i bits = _mm256_load_si256((const __m256i *)(const void *)row);
  const __m512i value = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  return _mm512_mul_ps(_mm512_castsi512_ps(value), _mm512_load_ps(scale));
}

static void fold(const uint16_t *row, const float *scale, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i += 32) {
    const __m512 low = scaled(row + i, scale + i), high = scaled(row + i + 16, scale + i + 16);
    _mm512_store_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

/* Magnitudes of numbers are ordered as their bits are. */
static float largest(const uint16_t *row, const float *factor, int64_t n) {
  __m512i most = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i bits = _mm512_castps_si512(scaled(row + i, factor + i));
    most = _mm512_max_epu32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  return kt_float(_mm512_reduce_max_epu32(most));
}

/* 32 codes as words; 0 where they are not kept. Four of each lane of the lower half, then four of
 * the upper one. */
KT_INLINE __m512i words_of(const uint16_t *row, const float *factor, __m512 reciprocal,
                           __mmask16 kept) {
  const __m512 low = _mm512_mul_ps(scaled(row, factor), reciprocal);
  const __m512 high = _mm512_mul_ps(scaled(row + 16, factor + 16), reciprocal);
  return _mm512_packs_epi32(_mm512_maskz_cvtps_epi32(kept, low),
                            _mm512_maskz_cvtps_epi32(kept, high));
}

/* 64 codes. Packing works within lanes: words 4k .. 4k + 3 of a vector of bytes come from 16
 * numbers each, and are put in their order last. */
KT_INLINE void split_codes(const uint16_t *row, const float *factor, __m512 reciprocal,
                           __mmask16 kept, int8_t *high, int8_t *low) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i half = _mm512_set1_epi16(128);
  __m512i upper[2], lower[2];
  for (int k = 0; k < 2; k++) {
    const __m512i words = words_of(row + 32 * k, factor + 32 * k, reciprocal, kept);
    upper[k] = _mm512_srai_epi16(_mm512_add_epi16(words, half), 8);
    lower[k] = _mm512_sub_epi16(words, _mm512_slli_epi16(upper[k], 8));
  }
  const __m512i highs = _mm512_packs_epi16(upper[0], upper[1]);
  const __m512i lows = _mm512_packs_epi16(lower[0], lower[1]);
  _mm512_store_si512(high, _mm512_permutexvar_epi32(order, highs));
  _mm512_store_si512(low, _mm512_permutexvar_epi32(order, lows));
}

static float split(const uint16_t *row, const float *factor, int64_t n, int8_t *high, int8_t *low) {
  const float amax = largest(row, factor, n), scale = amax * KT_SPLIT_STEP;
  const int good = amax <= FLT_MAX && scale >= FLT_MIN;
  const __m512 reciprocal = _mm512_set1_ps(good ? 1.0f / scale : 0.0f);
  const __mmask16 kept = good ? 0xffff : 0;
  for (int64_t i = 0; i < n; i += 64)
    split_codes(row + i, factor + i, reciprocal, kept, high + i, low + i);
  return !(amax <= FLT_MAX) ? NAN : good ? scale : 0.0f;
}

const kt_strips kt_strips_avx512 = {rows, columns, fold, split};

KT_TARGET_END
#endif
