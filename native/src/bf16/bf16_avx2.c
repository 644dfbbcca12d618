/* BF16 products with AVX2 (float_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/float_gemm_avx2.h"
#include "bf16.h"

/* A line has two columns of 16 rows. */
KT_INLINE void decode(const kt_weight *w, int64_t n, int64_t k, float *out) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_BF16_TILE, n, k);
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  for (int row = 0; row < KT_STRIP; row += 8)
    for (int q = 0; q < KT_TILE_COLS / 2; q++) {
      const uint8_t *const at = tile + row / KT_HALF_ROWS * KT_BF16_HALF_TILE + q * KT_LINE;
      const __m256i pairs =
          _mm256_loadu_si256((const __m256i *)(const void *)(at + row % KT_HALF_ROWS * 4));
      float *const to = out + 2 * q * KT_STRIP + row;
      _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
      _mm256_storeu_ps(to + KT_STRIP, _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)));
    }
}

void kt_bf16_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_float_product(decode, NULL, 0, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
