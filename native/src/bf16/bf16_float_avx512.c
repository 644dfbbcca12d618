/* BF16 products with fused multiply-adds of AVX-512 (float_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../gemm/float_gemm_avx512.h"
#include "bf16.h"

KT_INLINE void lines(const uint8_t *tile, const int q, __m512 line[4]) {
  for (int half = 0; half < 2; half++)
    kt_float_pairs(_mm512_loadu_si512(tile + half * KT_BF16_HALF_TILE + q * KT_LINE), line + half,
                   line + 2 + half);
}

#define FORM ((kt_float_form){KT_BF16_TILE, 0, lines, NULL, KT_BF16_TILE, 0})
KT_FLOAT_KERNELS(FORM, kernels)

void kt_bf16_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                  const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                  uint8_t *panel) {
  kt_float_product(FORM, &kernels, w, strip, strips, x, stride, tokens, out, panel);
}

void kt_bf16_adding_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                         const uint8_t *x, int64_t stride, int64_t tokens,
                                         float *out, uint8_t *panel) {
  kt_float_add_product(FORM, &kernels, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
