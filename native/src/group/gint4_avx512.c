/* Group INT4 products with AVX-512 VNNI. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_VNNI)
#include "../gemm/group_gemm_avx512.h"
#include "gint4.h"

void kt_gint4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  (void)panel;
  kt_group_product_avx512(4, w, strip, strips, x, stride, tokens, out);
}

KT_TARGET_END
#endif
