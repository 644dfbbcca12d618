/* The limits of AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../simd/unroll.h"
#include "limits.h"

enum { CHAINS = 16 };

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

KT_INLINE __m512i add_int8(__m512i sum) {
  return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_set1_epi8(2));
}

KT_INLINE __m512 add_bf16(__m512 sum) {
  const __m512i one = _mm512_set1_epi16(0x3f80), half = _mm512_set1_epi16(0x3f00);
  return _mm512_dpbf16_ps(sum, (__m512bh)one, (__m512bh)half);
}

/* Plain F only: of bf16 numbers as binary32. */
KT_INLINE __m512 add_floats(__m512 sum) {
  return _mm512_fmadd_ps(_mm512_set1_ps(1.0f), _mm512_set1_ps(0.5f), sum);
}

/* `each`: multiply-adds of `add`. The empty statements keep the sums alive, and the compiler from
 * doing the loop at once. */
#define DEFINE(name, vector, zero, add, each)                                                      \
  void kt_limit_##name##_avx512(int64_t rounds) {                                                  \
    vector sum[CHAINS];                                                                            \
    for (int i = 0; i < CHAINS; i++) sum[i] = zero();                                              \
    for (int64_t n = rounds * (KT_ROUND / (CHAINS * (each))); n > 0; n--) {                        \
      KT_UNROLL(16)                                                                                \
      for (int i = 0; i < CHAINS; i++) sum[i] = add(sum[i]);                                       \
      __asm__ volatile("" ::"v"(sum[0]));                                                          \
    }                                                                                              \
    KT_UNROLL(16)                                                                                  \
    for (int i = 0; i < CHAINS; i++) __asm__ volatile("" ::"v"(sum[i]));                           \
  }

DEFINE(int8, __m512i, _mm512_setzero_si512, add_int8, 64)
DEFINE(bf16, __m512, _mm512_setzero_ps, add_bf16, 32)
DEFINE(bf16_float, __m512, _mm512_setzero_ps, add_floats, 16)

KT_TARGET_END
#endif
