/* BF16 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_stream.h"
#include "bf16.h"

KT_INLINE kt_amx_strip strip_of(const kt_weight *w, int64_t strip) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  return kt_amx_whole_strip(w->codes + strip * tiles * KT_BF16_TILE, NULL, tiles);
}

void kt_bf16_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                        int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {.steps = 1, .size = KT_BF16_TILE};
  kt_amx_stream(form, strip_of, w, strip, x, stride, tokens, NULL, beside, out);
  *sums = kt_sums_of(out, tokens);
}

void kt_bf16_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_streamed_product(kt_bf16_stream_amx, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
