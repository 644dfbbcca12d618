/* FP8 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/bf16_gemm_amx.h"
#include "fp8.h"

enum { LEAST_TOKENS = 9 }; /* see amx_tiles.h */

/* Scales of a row are those of the K block's one group: multiplied after the sum. */
static void decode(const kt_weight *w, int64_t strip, int64_t k, int64_t cols, kt_decoded *out) {
  const int64_t block = w->layout.group ? KT_FP8_BLOCK : cols;
  const float *const scale = w->scale;
  kt_fp8_decode_tiles(w->codes + kt_bf16_tile_start(w->cols, KT_FP8_TILE, strip * KT_STRIP, k),
                      cols / KT_TILE_COLS, out->tiles);
  out->groups = cols / block;
  out->group_tiles = block / KT_TILE_COLS;
  for (int64_t i = 0; i < out->groups * KT_STRIP; i++)
    out->scale[i] = w->layout.group
                        ? scale[strip * (w->cols / KT_FP8_BLOCK) + k / KT_FP8_BLOCK + i / KT_STRIP]
                        : scale[strip * KT_STRIP + i];
}

void kt_fp8_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                        int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < LEAST_TOKENS)
    kt_fp8_product_float_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_bf16_decoded_product(decode, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
