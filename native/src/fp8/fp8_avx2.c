/* FP8 and MXFP8 products with AVX2 (float_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/float_gemm_avx2.h"
#include "fp8.h"

/* 16 bytes of a line have two columns of 4 rows, and of those 16 rows further on. */
KT_INLINE void decode(const kt_weight *w, int64_t n, int64_t k, float *out) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_FP8_TILE, n, k);
  for (int q = 0; q < KT_TILE_COLS / 2; q++)
    for (int row = 0; row < KT_HALF_ROWS; row += 4) {
      const uint8_t *const at = tile + q * KT_LINE + row * 4;
      const __m128i pairs = _mm_loadu_si128((const __m128i *)(const void *)at);
      const __m256 columns[2] = {kt_float_e4m3(_mm_slli_epi16(pairs, 8)), kt_float_e4m3(pairs)};
      for (int i = 0; i < 2; i++) {
        float *const to = out + (2 * q + i) * KT_STRIP + row;
        _mm_storeu_ps(to, _mm256_castps256_ps128(columns[i]));
        _mm_storeu_ps(to + KT_HALF_ROWS, _mm256_extractf128_ps(columns[i], 1));
      }
    }
}

/* Of a block of 128 x 128. */
KT_INLINE void scales_of(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]) {
  const float *const all = w->scale;
  const float one = all[n / KT_STRIP * (w->cols / KT_FP8_BLOCK) + k / KT_FP8_BLOCK];
  for (int r = 0; r < KT_STRIP; r++) scale[r] = one;
}

void kt_fp8_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (w->layout.group) {
    kt_float_product(decode, scales_of, KT_FP8_BLOCK, w, strip, strips, x, stride, tokens, out,
                     panel);
    return;
  }
  kt_float_product(decode, NULL, 0, w, strip, strips, x, stride, tokens, out, panel);
  kt_float_scale_rows(w, strip, strips, tokens, out);
}

/* ---- MXFP8 ------------------------------------------------------------------- */

KT_INLINE void powers_of(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]) {
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP8_GROUP, n, k / KT_MXFP8_GROUP);
  kt_float_powers((const uint8_t *)w->scale + at, scale);
}

void kt_mxfp8_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_float_product(decode, powers_of, KT_MXFP8_GROUP, w, strip, strips, x, stride, tokens, out,
                   panel);
}

KT_TARGET_END
#endif
