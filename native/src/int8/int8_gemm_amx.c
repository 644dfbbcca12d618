/* INT8 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/int_gemm_amx.h"
#include "int8.h"

enum { LEAST_TOKENS = 10 }; /* see amx_tiles.h */

void kt_int8_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < LEAST_TOKENS)
    kt_int8_product_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_int_product_amx(0, KT_INT8_BLOCK_ROWS, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
