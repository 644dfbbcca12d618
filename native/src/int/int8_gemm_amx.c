/* INT8 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/int_gemm_amx.h"
#include "int.h"

KT_INLINE kt_amx_strip strip_of(const kt_weight *w, int64_t strip) {
  return kt_int_amx_strip(0, KT_INT8_BLOCK_ROWS, w, strip);
}

void kt_int8_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                        int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {.int8 = 1, .steps = 1, .size = KT_AMX_TILES};
  kt_amx_stream(form, strip_of, w, strip, x, stride, tokens, NULL, beside, out);
  kt_int_amx_sums(0, w, strip, x, stride, tokens, out, sums);
}

void kt_int8_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < kt_least_tokens(&w->layout))
    kt_int8_product_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_streamed_product(kt_int8_stream_amx, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
