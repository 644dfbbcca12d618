/* bf16_strip_avx512.h - packed tiles to tiles of a strip of the transpose (kt_transpose_fn).
 *
 * A tile of a strip has, in each of its lines, two rows of w (2q and 2q+1) and 16 columns, number
 * by number in turn. So rows are first brought into pairs, within the lines of the packed tile,
 * then pairs are transposed as 32 or 64-bit words, as narrow as they are packed, and widened last.
 *
 * Tiles of a strip are far apart in packed weights: later ones are prefetched. (Strips of 768 x
 * 2048 from DRAM on a busy Zen 4, median microseconds with 0, 2, 4 and 8 tiles ahead:
 * BF16 4.1, 3.0, 3.0, 3.2; group INT4 2.4, 1.5, 1.3, 1.1; of 2048 x 768, 8.0, 4.1, 3.5, 3.8.)
 *
 * Include after KT_TARGET_BEGIN(AVX512_BF16). */
#ifndef KT_BF16_STRIP_AVX512_H
#define KT_BF16_STRIP_AVX512_H

#include "../simd/bits.h"
#include "../simd/transpose_avx512.h"
#include "../simd/unroll.h"
#include "bf16_gemm.h"

enum { KT_TILES_AHEAD = 4 };

/* `size` bytes (a multiple of 64) of a later tile, into L2; past the end it does nothing. */
KT_INLINE void kt_prefetch_tile(const uint8_t *codes, int64_t ahead, int size) {
  for (int i = 0; i < size; i += KT_LINE)
    __builtin_prefetch((const void *)((uintptr_t)codes + (uintptr_t)ahead + (uintptr_t)i), 0, 2);
}

/* Two rows of four numbers, in turn: of bytes or of 16-bit words (then of two numbers). */
KT_INLINE __m512i kt_bytes_in_turn(__m512i rows) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  return _mm512_shuffle_epi8(rows, order);
}

KT_INLINE __m512i kt_words_in_turn(__m512i rows) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  return _mm512_shuffle_epi8(rows, order);
}

/* Eight lines, line p with columns 4p to 4p + 3 of 16 rows, 32 bits each (words: as two words, else
 * as four bytes). pair[j]: rows 2j and 2j + 1 in turn; in lane l, columns 4l to 4l + 3 in the lower
 * half, the columns 16 further on in the upper, so that unpacking gives the lines of both halves.
 */
KT_INLINE void kt_row_pairs(const int words, const uint8_t *lines, __m512i pair[8]) {
  static const int order[] = {0, 4, 1, 5, 2, 6, 3, 7};
  __m512i row[8];
  for (int i = 0; i < 8; i++) {
    const __m512i line = _mm512_loadu_si512(lines + order[i] * KT_LINE);
    row[i] = words ? kt_words_in_turn(line) : kt_bytes_in_turn(line);
  }
  kt_transpose8x64(row, pair);
}

/* Eight lines with 16 columns of 16 rows. */
KT_INLINE void kt_transpose_quarter(const uint8_t *lines, uint8_t *out) {
  __m512i row[8], pair[8];
  for (int i = 0; i < 8; i++) row[i] = kt_words_in_turn(_mm512_loadu_si512(lines + i * KT_LINE));
  kt_transpose8x64(row, pair);
  for (int j = 0; j < 8; j++) _mm512_store_si512(out + j * KT_LINE, pair[j]);
}

/* A tile of bf16, whose columns become rows. */
KT_INLINE void kt_transpose_tile(const uint8_t *tile, uint8_t *out) {
  for (int i = 0; i < 2; i++)   /* rows */
    for (int j = 0; j < 2; j++) /* columns */
      kt_transpose_quarter(tile + (2 * i + j) * KT_BF16_HALF_TILE / 2,
                           out + (2 * j + i) * KT_BF16_HALF_TILE / 2);
}

/* Line q of both halves. */
KT_INLINE void kt_store_lines(uint8_t *tile, int q, __m512i line0, __m512i line1) {
  _mm512_store_si512(tile + q * KT_LINE, line0);
  _mm512_store_si512(tile + KT_BF16_HALF_TILE + q * KT_LINE, line1);
}

/* Bytes of the bf16 numbers of 16 codes, in each lane. */
typedef struct kt_nibble_tables {
  __m512i low, high;
} kt_nibble_tables;

/* Integers: nibble i stands for (i ^ flip) - 8. */
KT_INLINE kt_nibble_tables kt_nibble_integers(int flip) {
  _Alignas(16) uint8_t low[16], high[16];
  for (int i = 0; i < 16; i++) {
    const uint16_t bits = kt_bf16_bits((float)((i ^ flip) - 8));
    low[i] = (uint8_t)bits;
    high[i] = (uint8_t)(bits >> 8);
  }
  return (kt_nibble_tables){
      _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)low)),
      _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)high))};
}

/* Stores line q of a pair whose nibbles are the low ones of bytes. */
KT_INLINE void kt_store_nibbles(const kt_nibble_tables *t, __m512i pair, uint8_t *tile, int q) {
  const __m512i nibble = _mm512_and_si512(pair, _mm512_set1_epi8(15));
  const __m512i low = _mm512_shuffle_epi8(t->low, nibble);
  const __m512i high = _mm512_shuffle_epi8(t->high, nibble);
  kt_store_lines(tile, q, _mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
}

#endif
