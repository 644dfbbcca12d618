/* The limits of AVX2: pairs of products of bytes, added in 16 bits, and fused products. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "limits.h"

enum { CHAINS = 12, INT8_OPS = 32, F32_OPS = 8 }; /* multiply-adds of an instruction */

uint64_t kt_limit_read_avx2(const uint8_t *memory, size_t size, int32_t streams) {
  __m256i sum = _mm256_setzero_si256();
  for (size_t i = 0; i < size; i += 256)
    for (int32_t s = 0; s < streams; s++) {
      const uint8_t *from = memory + (size_t)s * size + i;
#pragma GCC unroll 8
      for (size_t j = 0; j < 256; j += 32)
        sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)(const void *)(from + j)));
    }
  uint64_t words[4], all = 0;
  _mm256_storeu_si256((__m256i *)(void *)words, sum);
  for (int i = 0; i < 4; i++) all |= words[i];
  return all;
}

/* The empty statements keep the sums alive, and the compiler from doing the loop at once. */
void kt_limit_int8_avx2(int64_t rounds) {
  __m256i a = _mm256_set1_epi8(1), sum[CHAINS];
  const __m256i b = _mm256_set1_epi8(2);
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_setzero_si256();
  for (int64_t n = rounds * (KT_ROUND / INT8_OPS) / CHAINS; n > 0; n--) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) {
      __asm__ volatile("" : "+x"(a));
      sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(a, b));
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" ::"x"(sum[i]));
}

void kt_limit_bf16_avx2(int64_t rounds) {
  const __m256 a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(0.5f);
  __m256 sum[CHAINS];
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_setzero_ps();
  for (int64_t n = rounds * (KT_ROUND / F32_OPS) / CHAINS; n > 0; n--) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_fmadd_ps(a, b, sum[i]);
    __asm__ volatile("" ::"x"(sum[0]));
  }
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" ::"x"(sum[i]));
}

KT_TARGET_END
#endif
