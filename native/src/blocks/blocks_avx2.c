/* Blocks of ggml as the compiler vectorizes them for AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../simd/transpose_avx2.h"

/* to[k]: element k of 8 rows that are `stride` numbers apart. */
KT_INLINE void transposed(void *to, const float *x, int stride) {
  __m256i row[8], column[8];
  for (int r = 0; r < 8; r++) row[r] = _mm256_loadu_si256((const __m256i *)(x + r * stride));
  kt_transpose8(row, column);
  for (int k = 0; k < 8; k++) _mm256_storeu_si256((__m256i *)to + k, column[k]);
}

#define KT_BLOCKS_MIN _mm256_min_ps
#define KT_BLOCKS_MAX _mm256_max_ps
#define KT_BLOCKS_TRANSPOSED transposed
#include "blocks_loop.h"

kt_status kt_blocks_avx2(const kt_blocks_job *job) { return blocks_any(job); }

KT_TARGET_END
#endif
