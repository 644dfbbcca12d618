/* MXFP4 products with AVX2 (float_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/float_gemm_avx2.h"
#include "../simd/bits.h"
#include "mxfp4.h"

KT_INLINE void decode(const kt_weight *w, int64_t n, int64_t k, float *out) {
  kt_float_fp4_tile(w->codes + kt_bf16_tile_start(w->cols, KT_FP4_TILE, n, k), out);
}

KT_INLINE void scales_of(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]) {
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP4_GROUP, n, k / KT_MXFP4_GROUP);
  for (int r = 0; r < KT_STRIP; r++) {
    uint32_t bits;
    if (w->layout.scale_dtype == KT_SCALE_BF16) {
      bits = (uint32_t)((const uint16_t *)w->scale)[at + r] << 16;
    } else { /* the byte is the exponent; 0 means 2^-127, the one denormal */
      const uint32_t exponent = (uint32_t)((const uint8_t *)w->scale)[at + r] << 23;
      bits = exponent ? exponent : 0x00400000u;
    }
    scale[r] = kt_float(bits);
  }
}

void kt_mxfp4_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_float_product(decode, scales_of, KT_MXFP4_GROUP, w, strip, strips, x, stride, tokens, out,
                   panel);
}

KT_TARGET_END
#endif
