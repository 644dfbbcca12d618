/* NVFP4 products with fused multiply-adds of AVX-512 (float_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../gemm/float_gemm_avx512.h"
#include "../gemm/row_scales_avx512.h"
#include "nvfp4.h"

KT_INLINE void scales_of(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k);
  const uint8_t *const from = tile + KT_FP4_TILE + k % KT_TILE_COLS / KT_NVFP4_GROUP * KT_STRIP;
  for (int half = 0; half < 2; half++) scale[half] = kt_float_e4m3(from + 16 * half);
}

#define FORM ((kt_float_form){KT_NVFP4_TILE, KT_NVFP4_GROUP, kt_float_fp4_lines, scales_of})
KT_FLOAT_KERNELS(FORM, kernels)

void kt_nvfp4_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  kt_float_product(FORM, &kernels, w, strip, strips, x, stride, tokens, out, panel);
  kt_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
