/* Group INT4 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/group_gemm_amx.h"
#include "group.h"

KT_GROUP_STREAM(4, kt_gint4_stream_amx)

void kt_gint4_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < kt_least_tokens(&w->layout))
    kt_gint4_product_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_streamed_product(kt_gint4_stream_amx, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
