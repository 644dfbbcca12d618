/* row_scales_avx512.h - products times binary32 scales of rows. Include after a KT_TARGET_BEGIN. */
#ifndef KT_ROW_SCALES_AVX512_H
#define KT_ROW_SCALES_AVX512_H

#include "bf16_gemm.h"

/* out[s][t][32 rows] *= scale of the rows. */
KT_INLINE void kt_scale_rows(const kt_weight *w, int64_t strip, int64_t strips, int64_t tokens,
                             float *out) {
  for (int64_t s = 0; s < strips; s++) {
    const float *const scale = (const float *)w->scale + (strip + s) * KT_STRIP;
    const __m512 scale0 = _mm512_loadu_ps(scale), scale1 = _mm512_loadu_ps(scale + KT_HALF_ROWS);
    for (int64_t t = 0; t < tokens; t++, out += KT_STRIP) {
      _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), scale0));
      _mm512_storeu_ps(out + KT_HALF_ROWS,
                       _mm512_mul_ps(_mm512_loadu_ps(out + KT_HALF_ROWS), scale1));
    }
  }
}

#endif
