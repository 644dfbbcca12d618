/* The sums of the audit's search in fixed point with AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "packed_fixed_sums.h"

KT_TARGET_BEGIN(AVX2)

INLINE int64_t total_of(__m256i sums) {
  const __m256i low = _mm256_cvtepu32_epi64(_mm256_castsi256_si128(sums));
  const __m256i four =
      _mm256_add_epi64(low, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(sums, 1)));
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
}

/* Of 4096 columns a lane has the products of 512 at most: 127 * 32767 * 512 < 2^31. */
INLINE void sums_of(const int16_t *row, int64_t cols, const int bits, const int *step,
                    const int count, integer_sums *sums) {
  const __m256i half = _mm256_set1_epi16(bits == 4 ? 511 : 63);
  const __m256i top = _mm256_set1_epi16(bits == 4 ? 7 : 127);
  __m256i inverse[4];
  for (int i = 0; i < count; i++) {
    inverse[i] = _mm256_set1_epi16((int16_t)inverse_of(step[i], bits));
    sums[i] = (integer_sums){0, 0};
  }
  for (int64_t begin = 0; begin < cols; begin += 4096) {
    const int64_t end = least(begin + 4096, cols);
    __m256i product[4], square[4];
    KT_UNROLL(4) for (int i = 0; i < count; i++) product[i] = square[i] = _mm256_setzero_si256();
    for (int64_t c = begin; c < end; c += 16) {
      const __m256i m = _mm256_loadu_si256((const __m256i *)(const void *)(row + c));
      KT_UNROLL(4) for (int i = 0; i < count; i++) {
        const __m256i y = _mm256_add_epi16(_mm256_mulhi_epu16(m, inverse[i]), half);
        const __m256i near = bits == 4 ? _mm256_srli_epi16(y, 10) : _mm256_srli_epi16(y, 7);
        const __m256i code = _mm256_min_epi16(near, top);
        product[i] = _mm256_add_epi32(product[i], _mm256_madd_epi16(m, code));
        square[i] = _mm256_add_epi32(square[i], _mm256_madd_epi16(code, code));
      }
    }
    for (int i = 0; i < count; i++) {
      sums[i].product += total_of(product[i]);
      sums[i].square += total_of(square[i]);
    }
  }
}

/* Functions of their own, so that sums get all registers. */
static __attribute__((noinline)) void two(const int16_t *row, int64_t cols, const int *step,
                                          integer_sums *sums) {
  sums_of(row, cols, 4, step, 2, sums);
}

static __attribute__((noinline)) void four(const int16_t *row, int64_t cols, const int *step,
                                           integer_sums *sums) {
  sums_of(row, cols, 4, step, 4, sums);
}

static __attribute__((noinline)) void four_bytes(const int16_t *row, int64_t cols, const int *step,
                                                 integer_sums *sums) {
  sums_of(row, cols, 8, step, 4, sums);
}

void kt_audit_sums_avx2(const int16_t *row, int64_t cols, int bits, const int *step, int count,
                        integer_sums *sums) {
  (bits == 8 ? four_bytes : count == 2 ? two : four)(row, cols, step, sums);
}

KT_TARGET_END
#endif
