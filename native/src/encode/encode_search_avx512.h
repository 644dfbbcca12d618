/* encode_search_avx512.h - what encode_search.h has of AVX-512: 16 groups at a time. Include after
 * KT_TARGET_BEGIN(AVX512). */
#ifndef KT_ENCODE_SEARCH_AVX512_H
#define KT_ENCODE_SEARCH_AVX512_H

#include "../simd/transpose_avx512.h"

#define KT_ENCODE_LANES 16
#define LESSER(a, b) ((floats)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define GREATER(a, b) ((floats)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define FUSED(a, b, c) ((floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))

/* fill_panel: 16 columns at a time; how many. */
KT_INLINE int64_t own_columns(const float *const *at, int64_t from, int64_t cols, float *panel) {
  int64_t k = 0;
  for (; k + 16 <= cols; k += 16) {
    __m512i row[16], column[16];
    for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(at[i] + from + k);
    kt_transpose16(row, column);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + 16 * (k + i), column[i]);
  }
  return k;
}

#endif
