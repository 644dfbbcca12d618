/* The sums of the audit's search in fixed point with AVX-512, with VNNI or without, which compilers
 * make four times slower. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "packed_fixed_sums.h"

KT_TARGET_BEGIN(AVX512)

typedef __m512i dot_fn(__m512i sum, __m512i a, __m512i b);

INLINE __m512i dot_of(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

INLINE int64_t total_of(__m512i sums) {
  const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sums));
  const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(sums, 1));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
}

/* Of 4096 columns a lane has the products of 256 at most. */
INLINE void sums_of(const int16_t *row, int64_t cols, const int bits, const int *step,
                    const int count, dot_fn *dot, integer_sums *sums) {
  const __m512i half = _mm512_set1_epi16(bits == 4 ? 511 : 63);
  const __m512i top = _mm512_set1_epi16(bits == 4 ? 7 : 127);
  __m512i inverse[4];
  for (int i = 0; i < count; i++) {
    inverse[i] = _mm512_set1_epi16((int16_t)inverse_of(step[i], bits));
    sums[i] = (integer_sums){0, 0};
  }
  for (int64_t begin = 0; begin < cols; begin += 4096) {
    const int64_t end = least(begin + 4096, cols);
    __m512i product[4], square[4];
    KT_UNROLL(4) for (int i = 0; i < count; i++) product[i] = square[i] = _mm512_setzero_si512();
    for (int64_t c = begin; c < end; c += 32) {
      const __m512i m = _mm512_loadu_si512(row + c);
      KT_UNROLL(4) for (int i = 0; i < count; i++) {
        const __m512i y = _mm512_add_epi16(_mm512_mulhi_epu16(m, inverse[i]), half);
        const __m512i near = bits == 4 ? _mm512_srli_epi16(y, 10) : _mm512_srli_epi16(y, 7);
        const __m512i code = _mm512_min_epi16(near, top);
        product[i] = dot(product[i], m, code);
        square[i] = dot(square[i], code, code);
      }
    }
    for (int i = 0; i < count; i++) {
      sums[i].product += total_of(product[i]);
      sums[i].square += total_of(square[i]);
    }
  }
}

/* Functions of their own, so that sums get all registers. */
#define SUMS(level, dot)                                                                           \
  static __attribute__((noinline)) void two_##level(const int16_t *row, int64_t cols,              \
                                                    const int *step, integer_sums *sums) {         \
    sums_of(row, cols, 4, step, 2, dot, sums);                                                     \
  }                                                                                                \
  static __attribute__((noinline)) void four_##level(const int16_t *row, int64_t cols,             \
                                                     const int *step, integer_sums *sums) {        \
    sums_of(row, cols, 4, step, 4, dot, sums);                                                     \
  }                                                                                                \
  static __attribute__((noinline)) void four_bytes_##level(const int16_t *row, int64_t cols,       \
                                                           const int *step, integer_sums *sums) {  \
    sums_of(row, cols, 8, step, 4, dot, sums);                                                     \
  }                                                                                                \
  void kt_audit_sums_##level(const int16_t *row, int64_t cols, int bits, const int *step,          \
                             int count, integer_sums *sums) {                                      \
    (bits == 8    ? four_bytes_##level                                                             \
     : count == 2 ? two_##level                                                                    \
                  : four_##level)(row, cols, step, sums);                                          \
  }

SUMS(avx512, dot_of)
KT_TARGET_END

KT_TARGET_BEGIN(AVX512_VNNI)
INLINE __m512i dot_of_vnni(__m512i sum, __m512i a, __m512i b) {
  return _mm512_dpwssd_epi32(sum, a, b);
}

SUMS(vnni, dot_of_vnni)
KT_TARGET_END
#endif
