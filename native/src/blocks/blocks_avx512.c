/* Blocks of ggml as the compiler vectorizes them for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/transpose_avx512.h"

/* to[k]: element k of 16 rows that are `stride` numbers apart. */
KT_INLINE void transposed(void *to, const float *x, int stride) {
  __m512i row[16], column[16];
  for (int r = 0; r < 16; r++) row[r] = _mm512_loadu_si512(x + r * stride);
  kt_transpose16(row, column);
  for (int k = 0; k < 16; k++) _mm512_storeu_si512((__m512i *)to + k, column[k]);
}

#define KT_BLOCKS_LANES 16
#define KT_BLOCKS_MIN _mm512_min_ps
#define KT_BLOCKS_MAX _mm512_max_ps
#define KT_BLOCKS_TRANSPOSED transposed
#include "blocks_loop.h"

kt_status kt_blocks_avx512(const kt_blocks_job *job) { return blocks_any(job); }

KT_TARGET_END
#endif
