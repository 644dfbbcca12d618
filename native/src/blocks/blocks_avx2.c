/* Blocks of ggml as the compiler vectorizes them for AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../simd/transpose_avx2.h"
#include "../simd/unroll.h"

/* to[k]: element k of 8 rows that are `stride` numbers apart. */
KT_INLINE void transposed(void *to, const float *x, int stride) {
  __m256i row[8], column[8];
  for (int r = 0; r < 8; r++) row[r] = _mm256_loadu_si256((const __m256i *)(x + r * stride));
  kt_transpose8(row, column);
  for (int k = 0; k < 8; k++) _mm256_storeu_si256((__m256i *)to + k, column[k]);
}

/* Sums of 8 blocks of Q4_0, as plain_sums forms them. */
#define KT_BLOCKS_SUMS(pairs, inverse, product, square)                                            \
  sums_of((const __m256i *)(pairs), (__m256i)(inverse), (__m256i *)(product), (__m256i *)(square))
KT_INLINE void sums_of(const __m256i *pairs, __m256i inverse, __m256i *product, __m256i *square) {
  const __m256i both = _mm256_blend_epi16(inverse, _mm256_slli_epi32(inverse, 16), 0xaa);
  const __m256i top = _mm256_set1_epi16(7);
  __m256i xq = _mm256_setzero_si256(), qq = xq;
  KT_UNROLL(16) for (int k = 0; k < 16; k++) {
    const __m256i q = _mm256_min_epi16(_mm256_mulhrs_epi16(pairs[k], both), top);
    xq = _mm256_add_epi32(xq, _mm256_madd_epi16(pairs[k], q));
    qq = _mm256_add_epi32(qq, _mm256_madd_epi16(q, q));
  }
  *product = xq;
  *square = qq;
}

#define KT_BLOCKS_BYTES(from, to) lowest_bytes((__m256i)(from), to)
KT_INLINE void lowest_bytes(__m256i from, void *to) {
  const __m256i first = _mm256_set1_epi32(0x0c080400);
  const __m256i bytes = _mm256_shuffle_epi8(from, first);
  const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
  _mm_storel_epi64(to, _mm_unpacklo_epi32(low, high));
}

#define KT_BLOCKS_MIN _mm256_min_ps
#define KT_BLOCKS_MAX _mm256_max_ps
#define KT_BLOCKS_MAX_BITS(a, b) _mm256_max_epi32((__m256i)(a), (__m256i)(b))
#define KT_BLOCKS_TRANSPOSED transposed
#include "blocks_loop.h"

kt_status kt_blocks_avx2(const kt_blocks_job *job) { return blocks_any(job); }

KT_TARGET_END
#endif
