/* NVFP4 products with AVX2 (float_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/float_gemm_avx2.h"
#include "nvfp4.h"

KT_INLINE void decode(const kt_weight *w, int64_t n, int64_t k, float *out) {
  kt_float_fp4_tile(w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k), out);
}

KT_INLINE void scales_of(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k);
  const uint8_t *const from = tile + KT_FP4_TILE + k % KT_TILE_COLS / KT_NVFP4_GROUP * KT_STRIP;
  for (int r = 0; r < KT_STRIP; r += 8) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(from + r));
    _mm256_storeu_ps(scale + r, kt_float_e4m3(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes)));
  }
}

void kt_nvfp4_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_float_product(decode, scales_of, KT_NVFP4_GROUP, w, strip, strips, x, stride, tokens, out,
                   panel);
  kt_float_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
