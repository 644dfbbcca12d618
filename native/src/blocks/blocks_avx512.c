/* Blocks of ggml as the compiler vectorizes them for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/transpose_avx512.h"
#include "../simd/unroll.h"

/* to[k]: element k of 16 rows that are `stride` numbers apart. */
KT_INLINE void transposed(void *to, const float *x, int stride) {
  __m512i row[16], column[16];
  for (int r = 0; r < 16; r++) row[r] = _mm512_loadu_si512(x + r * stride);
  kt_transpose16(row, column);
  for (int k = 0; k < 16; k++) _mm512_storeu_si512((__m512i *)to + k, column[k]);
}

/* Sums of 16 blocks of Q4_0, as plain_sums forms them. */
#define KT_BLOCKS_SUMS(pairs, inverse, product, square)                                            \
  sums_of((const __m512i *)(pairs), (__m512i)(inverse), (__m512i *)(product), (__m512i *)(square))
KT_INLINE void sums_of(const __m512i *pairs, __m512i inverse, __m512i *product, __m512i *square) {
  const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, inverse, _mm512_slli_epi32(inverse, 16));
  const __m512i top = _mm512_set1_epi16(7);
  __m512i xq = _mm512_setzero_si512(), qq = xq;
  KT_UNROLL(16) for (int k = 0; k < 16; k++) {
    const __m512i q = _mm512_min_epi16(_mm512_mulhrs_epi16(pairs[k], both), top);
    xq = _mm512_add_epi32(xq, _mm512_madd_epi16(pairs[k], q));
    qq = _mm512_add_epi32(qq, _mm512_madd_epi16(q, q));
  }
  *product = xq;
  *square = qq;
}

#define KT_BLOCKS_BYTES(from, to) lowest_bytes((__m512i)(from), to)
KT_INLINE void lowest_bytes(__m512i from, void *to) {
  _mm_storeu_si128(to, _mm512_cvtepi32_epi8(from));
}

#define KT_BLOCKS_LANES 16
#define KT_BLOCKS_MIN _mm512_min_ps
#define KT_BLOCKS_MAX _mm512_max_ps
#define KT_BLOCKS_MAX_BITS(a, b) _mm512_max_epi32((__m512i)(a), (__m512i)(b))
#define KT_BLOCKS_TRANSPOSED transposed
#include "blocks_loop.h"

kt_status kt_blocks_avx512(const kt_blocks_job *job) { return blocks_any(job); }

KT_TARGET_END
#endif
