/* NVFP4 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/bf16_gemm_amx.h"
#include "nvfp4.h"

enum { LEAST_TOKENS = 6 }; /* see amx_tiles.h */

/* Numbers that contain the scales of groups: what is left is one scale per row. */
static void decode(const kt_weight *w, int64_t strip, int64_t k, int64_t cols, kt_decoded *out) {
  const int64_t row = strip * KT_STRIP, tiles = cols / KT_TILE_COLS;
  kt_nvfp4_decode_tiles(w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, row, k), tiles,
                        out->tiles);
  for (int r = 0; r < KT_STRIP; r++) out->scale[r] = ((const float *)w->scale)[row + r];
  out->groups = 1;
  out->group_tiles = tiles;
}

void kt_nvfp4_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < LEAST_TOKENS)
    kt_nvfp4_product_float_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_bf16_decoded_product(decode, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
