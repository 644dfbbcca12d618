/* transpose_avx2.h - 8x8 matrices of 32-bit words in registers. */
#ifndef KT_TRANSPOSE_AVX2_H
#define KT_TRANSPOSE_AVX2_H

#include "target.h"

/* On return column[4*lane + j] holds word j of 128-bit lane `lane` of row[0..7], in row order:
 * the transpose, in 24 shuffles. */
KT_INLINE void kt_transpose8(const __m256i row[8], __m256i column[8]) {
  __m256i pair[8], quad[8];
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
    pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) { /* quad[i+j] lane l: word j of lane l of rows i..i+3 */
    quad[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
    quad[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
    quad[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
    quad[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    column[j] = _mm256_permute2x128_si256(quad[j], quad[4 + j], 0x20);
    column[4 + j] = _mm256_permute2x128_si256(quad[j], quad[4 + j], 0x31);
  }
}

#endif
