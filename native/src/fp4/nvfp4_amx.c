/* NVFP4 products with AMX: numbers contain the scales of groups, and what is left is one per row.
 */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_blocks.h"
#include "nvfp4_tiles_avx512.h"

KT_INLINE void unpack(kt_amx_codes codes, uint8_t *tiles, const int part) {
  kt_nvfp4_decode_part(codes.at, part, tiles);
}

KT_INLINE kt_amx_strip strip_of(const kt_weight *w, int64_t strip) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  return kt_amx_whole_strip(w->codes + strip * tiles * KT_NVFP4_TILE, NULL, tiles);
}

void kt_nvfp4_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                         int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {.steps = 1, .size = KT_NVFP4_TILE, .unpack = unpack};
  kt_amx_stream_unpacked(form, strip_of, w, strip, x, stride, tokens, NULL, beside, out);
  *sums = kt_sums_of(out, tokens);
  sums->row_scale = (const float *)w->scale + strip * KT_STRIP;
}

void kt_nvfp4_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < kt_least_tokens(&w->layout))
    kt_nvfp4_product_float_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_streamed_product(kt_nvfp4_stream_amx, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
