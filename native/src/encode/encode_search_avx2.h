/* encode_search_avx2.h - what encode_search.h has of AVX2: 8 groups at a time. Include after
 * KT_TARGET_BEGIN(AVX2). */
#ifndef KT_ENCODE_SEARCH_AVX2_H
#define KT_ENCODE_SEARCH_AVX2_H

#include "../simd/transpose_avx2.h"

#define KT_ENCODE_LANES 8
#define LESSER(a, b) ((floats)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define GREATER(a, b) ((floats)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define FUSED(a, b, c) ((floats)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))

/* fill_panel: 8 columns at a time; how many. */
KT_INLINE int64_t own_columns(const float *const *at, int64_t from, int64_t cols, float *panel) {
  int64_t k = 0;
  for (; k + 8 <= cols; k += 8) {
    __m256i row[8], column[8];
    for (int i = 0; i < 8; i++)
      row[i] = _mm256_loadu_si256((const __m256i *)(const void *)(at[i] + from + k));
    kt_transpose8(row, column);
    for (int i = 0; i < 8; i++)
      _mm256_storeu_si256((__m256i *)(void *)(panel + 8 * (k + i)), column[i]);
  }
  return k;
}

#endif
