/* MXFP4 products with fused multiply-adds of AVX-512 (float_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../gemm/float_gemm_avx512.h"
#include "mxfp4.h"
#include "mxfp4_scales_avx512.h"

KT_INLINE void scales_of(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]) {
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP4_GROUP, n, k / KT_MXFP4_GROUP);
  for (int half = 0; half < 2; half++)
    scale[half] = kt_mxfp4_scales(w->layout.scale_dtype, w->scale, at + 16 * half);
}

#define FORM ((kt_float_form){KT_FP4_TILE, KT_MXFP4_GROUP, kt_float_fp4_lines, scales_of})
KT_FLOAT_KERNELS(FORM, kernels)

void kt_mxfp4_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  kt_float_product(FORM, &kernels, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
