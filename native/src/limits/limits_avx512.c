/* The limits of AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "limits.h"

enum { CHAINS = 16, INT8_OPS = 64, BF16_OPS = 32, FLOAT_OPS = 16 }; /* multiply-adds of one */

/* Plain F only: it also runs where a newer level is missing. */
uint64_t kt_limit_read_avx512(const uint8_t *memory, size_t size, int32_t streams) {
  __m512i sum = _mm512_setzero_si512();
  for (size_t i = 0; i < size; i += 256)
    for (int32_t s = 0; s < streams; s++) {
      const uint8_t *from = memory + (size_t)s * size + i;
#pragma GCC unroll 4
      for (size_t j = 0; j < 256; j += 64)
        sum = _mm512_xor_si512(sum, _mm512_loadu_si512(from + j));
    }
  return (uint64_t)_mm512_reduce_or_epi64(sum);
}

/* The empty statements keep the sums alive, and the compiler from doing the loop at once. */
void kt_limit_int8_avx512(int64_t rounds) {
  const __m512i a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
  __m512i sum[CHAINS];
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_setzero_si512();
  for (int64_t n = rounds * (KT_ROUND / (CHAINS * INT8_OPS)); n > 0; n--) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
      sum[i] = _mm512_dpbusd_epi32(sum[i], a, b);
    }
    __asm__ volatile("" ::"v"(sum[0]));
  }
#pragma GCC unroll 16
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" ::"v"(sum[i]));
}

void kt_limit_bf16_avx512(int64_t rounds) {
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = (__m512bh)_mm512_set1_epi16(0x3f00);
  __m512 sum[CHAINS];
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_setzero_ps();
  for (int64_t n = rounds * (KT_ROUND / (CHAINS * BF16_OPS)); n > 0; n--) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
      sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
    }
    __asm__ volatile("" ::"v"(sum[0]));
  }
#pragma GCC unroll 16
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" ::"v"(sum[i]));
}

/* Plain F only: of bf16 numbers as binary32. */
void kt_limit_bf16_float_avx512(int64_t rounds) {
  const __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0.5f);
  __m512 sum[CHAINS];
  for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_setzero_ps();
  for (int64_t n = rounds * (KT_ROUND / (CHAINS * FLOAT_OPS)); n > 0; n--) {
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
      sum[i] = _mm512_fmadd_ps(a, b, sum[i]);
    }
    __asm__ volatile("" ::"v"(sum[0]));
  }
#pragma GCC unroll 16
  for (int i = 0; i < CHAINS; i++) __asm__ volatile("" ::"v"(sum[i]));
}

KT_TARGET_END
#endif
