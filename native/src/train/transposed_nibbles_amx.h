/* transposed_nibbles_amx.h - decoding nibbles with scales by groups, for transposed_amx.h.
 *
 * A line of bf16 has two rows in turn. VPERMW looks its 32 words up: the products of all 16 codes
 * with the scales of the two rows, rounded to bf16. A unit is 16 rows x 32 columns; four bytes of
 * each row in a line have four columns, in the low nibbles of the first 16 rows of a square and in
 * the high ones of the others. Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_TRANSPOSED_NIBBLES_AMX_H
#define KT_TRANSPOSED_NIBBLES_AMX_H

#include "transposed_amx.h"

/* a, b: the bytes of rows 0 and 1 in turn as words, of rows 2 and 3; c: the numbers of the codes.
 * order: the bytes of a row, by columns. */
KT_INLINE kt_unpack_tables kt_nibble_words(const int order[4], __m512 numbers) {
  _Alignas(16) uint8_t at[2][16];
  for (int i = 0; i < 16; i++) {
    const int byte = order[i / 4] + i / 2 % 2 * 4;
    at[0][i] = (uint8_t)(i % 2 ? 0x80 : byte); /* 0x80: zero */
    at[1][i] = (uint8_t)(i % 2 ? 0x80 : byte + 8);
  }
  return (kt_unpack_tables){
      .a = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)at[0])),
      .b = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)(const void *)at[1])),
      .c = _mm512_castps_si512(numbers)};
}

/* The words of two rows. */
KT_INLINE __m512i kt_scaled_codes(const kt_unpack_tables *t, const float *scale) {
  const __m512 numbers = _mm512_castsi512_ps(t->c);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(numbers, _mm512_set1_ps(scale[1])),
                                      _mm512_mul_ps(numbers, _mm512_set1_ps(scale[0])));
}

/* Codes in words at `shift`, of odd words from the upper half of the table. */
KT_INLINE __m512i kt_look_up_words(__m512i table, __m512i words, __m512i shift) {
  const __m512i nibble = _mm512_set1_epi32(0x000f000f), odd = _mm512_set1_epi32(0x00100000);
  const __m512i code = _mm512_srlv_epi16(words, shift);
  return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(code, nibble, odd, 0xea), table);
}

/* Rows 4q to 4q + 3: two lines of each 16 columns. scales: of 16 rows, or (two) of each 16
 * columns. */
KT_INLINE void kt_nibble_part(const int two, const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0) u->kept[0] = _mm512_set1_epi16((int16_t)(4 * u->half));
  const __m512i shift = u->kept[0];
  const float *const scale = u->scale + 4 * q;
  __m512i first = kt_scaled_codes(t, scale), second = kt_scaled_codes(t, scale + 2);
  kt_prefetch_line(u->ahead + (4 * u->half + q) * KT_LINE);
  KT_UNROLL(2)
  for (int j = 0; j < 2; j++) {
    const __m512i rows = kt_four_lines(u->codes + j * 4 * KT_LINE + 16 * q, KT_LINE);
    uint8_t *const to = u->to + j * KT_BF16_HALF_TILE + 2 * q * KT_LINE;
    if (two && j == 1)
      first = kt_scaled_codes(t, scale + 16), second = kt_scaled_codes(t, scale + 18);
    _mm512_store_si512(to, kt_look_up_words(first, _mm512_shuffle_epi8(rows, t->a), shift));
    _mm512_store_si512(to + KT_LINE,
                       kt_look_up_words(second, _mm512_shuffle_epi8(rows, t->b), shift));
  }
}

/* Where the scale of (row n, column) of a group's own is. */
KT_INLINE const void *kt_group_scale_at(const kt_weight *w, int64_t n, int64_t column) {
  const int64_t group = w->layout.group;
  const int64_t at = kt_group_scale_index(w->cols, group, n, column / group);
  const int64_t size = w->layout.scale_dtype == KT_SCALE_F32    ? 4
                       : w->layout.scale_dtype == KT_SCALE_BF16 ? 2
                                                                : 1;
  return (const uint8_t *)w->scale + at * size;
}

#endif
