/* BF16 products with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../common/target_avx512_bf16.h"

#include "../common/bf16_gemm_avx512.h"
#include "bf16.h"

void kt_bf16_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                            int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_bf16_product(KT_FORM_BF16, NULL, w, strip, strips, w->cols, NULL, x, stride, tokens, out,
                  panel);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
