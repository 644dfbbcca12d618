/* INT4 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/int_gemm_amx.h"
#include "int4.h"

enum { LEAST_TOKENS = 14 }; /* see amx_tiles.h */

void kt_int4_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < LEAST_TOKENS)
    kt_int4_product_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_int_product_amx(1, KT_INT4_BLOCK_ROWS, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
