/* transpose_avx512.h - matrices in registers: 16x16 of 32-bit words, 8x8 of 64-bit words. */
#ifndef KT_TRANSPOSE_AVX512_H
#define KT_TRANSPOSE_AVX512_H

#include "target.h"

/* On return column[4*lane + j] holds word j of 128-bit lane `lane` of row[0..15], in row
 * order: the transpose, in 64 shuffles. */
KT_INLINE void kt_transpose16(const __m512i row[16], __m512i column[16]) {
  __m512i pair[16], quad[16];
  for (int i = 0; i < 16; i += 2) {
    pair[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    pair[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) { /* quad[i+j] lane l: word j of lane l of rows i..i+3 */
    quad[i] = _mm512_unpacklo_epi64(pair[i], pair[i + 2]);
    quad[i + 1] = _mm512_unpackhi_epi64(pair[i], pair[i + 2]);
    quad[i + 2] = _mm512_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    quad[i + 3] = _mm512_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    const __m512i even0 = _mm512_shuffle_i32x4(quad[j], quad[4 + j], 0x88);
    const __m512i odd0 = _mm512_shuffle_i32x4(quad[j], quad[4 + j], 0xdd);
    const __m512i even1 = _mm512_shuffle_i32x4(quad[8 + j], quad[12 + j], 0x88);
    const __m512i odd1 = _mm512_shuffle_i32x4(quad[8 + j], quad[12 + j], 0xdd);
    column[j] = _mm512_shuffle_i32x4(even0, even1, 0x88);
    column[4 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
    column[8 + j] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
    column[12 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
  }
}

/* On return column[j] holds word j of row[0..7], in row order: 24 shuffles. */
KT_INLINE void kt_transpose8x64(const __m512i row[8], __m512i column[8]) {
  __m512i pair[8]; /* pair[i+j] lane l: word 2l+j of rows i and i+1 */
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm512_unpacklo_epi64(row[i], row[i + 1]);
    pair[i + 1] = _mm512_unpackhi_epi64(row[i], row[i + 1]);
  }
  for (int j = 0; j < 2; j++) {
    const __m512i even0 = _mm512_shuffle_i64x2(pair[j], pair[2 + j], 0x88);
    const __m512i odd0 = _mm512_shuffle_i64x2(pair[j], pair[2 + j], 0xdd);
    const __m512i even1 = _mm512_shuffle_i64x2(pair[4 + j], pair[6 + j], 0x88);
    const __m512i odd1 = _mm512_shuffle_i64x2(pair[4 + j], pair[6 + j], 0xdd);
    column[j] = _mm512_shuffle_i64x2(even0, even1, 0x88);
    column[2 + j] = _mm512_shuffle_i64x2(odd0, odd1, 0x88);
    column[4 + j] = _mm512_shuffle_i64x2(even0, even1, 0xdd);
    column[6 + j] = _mm512_shuffle_i64x2(odd0, odd1, 0xdd);
  }
}

#endif
