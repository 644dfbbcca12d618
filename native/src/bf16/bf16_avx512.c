/* BF16 products with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_gemm_avx512.h"
#include "bf16.h"

KT_BF16_MICROS(reading, KT_FORM_BF16, 0, 1)
KT_BF16_MICROS(cached, KT_FORM_CACHED, 0, 1)
static const kt_bf16_kernels kernels = {reading, reading, cached, .as_is = 1},
                             in_cache = {cached, cached, cached, .as_is = 1};

void kt_bf16_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                            int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_bf16_product(KT_FORM_BF16, &kernels, NULL, w, strip, strips, w->cols, NULL, x, stride, tokens,
                  out, panel);
}

void kt_bf16_adding_product_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  kt_bf16_add_product(KT_FORM_CACHED, &in_cache, NULL, w, strip, strips, w->cols, NULL, x, stride,
                      tokens, out, panel);
}

KT_TARGET_END
#endif
