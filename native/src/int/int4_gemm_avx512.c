/* INT4 products with AVX-512 VNNI. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_VNNI)
#include "../gemm/int_gemm_avx512.h"
#include "int.h"

KT_INT_KERNELS(1, KT_INT4_LEAST_STREAMED)

void kt_int4_stream_avx512(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                           int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  kt_int_stream_avx512(1, &kernels_streamed, KT_INT4_BLOCK_ROWS, w, strip, x, stride, tokens,
                       beside, out, sums);
}

void kt_int4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                            int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < KT_INT4_LEAST_STREAMED)
    kt_int_product_avx512(1, &kernels_few, KT_INT4_BLOCK_ROWS, w, strip, strips, x, stride, tokens,
                          out);
  else
    kt_streamed_product(kt_int4_stream_avx512, w, strip, strips, x, stride, tokens, out, panel);
}

void kt_int4_product_zen(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  (void)panel;
  kt_int_product_avx512(1, &kernels_zen, KT_INT4_BLOCK_ROWS, w, strip, strips, x, stride, tokens,
                        out);
}

KT_TARGET_END
#endif
