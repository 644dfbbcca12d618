/* MXFP4 and NVFP4 products with AMX.
 *
 * A strip of MXFP4 whose scales are powers of two that bf16 can take in is decoded with them and
 * summed as one group. Others (bf16 scales, the outermost powers of two) keep groups of 32 columns,
 * whose sums are scaled and added as with AVX-512. Which of the two depends on the weights alone.
 * Decoded numbers of NVFP4 contain the scales of groups, and what is left is one per row. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_blocks.h"
#include "fp4_tiles_avx512.h"

/* ---- MXFP4 ------------------------------------------------------------------- */

KT_INLINE void unpack_mxfp4(kt_amx_codes codes, uint8_t *tiles, const int part) {
  kt_mxfp4_decode_part(codes.at, codes.scale, part, tiles);
}

KT_INLINE void unpack_unscaled(kt_amx_codes codes, uint8_t *tiles, const int part) {
  kt_mxfp4_decode_part(codes.at, NULL, part, tiles);
}

KT_INLINE void mxfp4_scales(const kt_amx_groups *s, int64_t g, __m512 scale[2]) {
  const int64_t at = (s->strip * s->number + g) * KT_STRIP;
  scale[0] = kt_mxfp4_scales(s->w->layout.scale_dtype, s->w->scale, at);
  scale[1] = kt_mxfp4_scales(s->w->layout.scale_dtype, s->w->scale, at + 16);
}

/* Scales of strips are only there where they are bytes. */
KT_INLINE kt_amx_strip mxfp4_strip(const kt_weight *w, int64_t strip) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  return kt_amx_whole_strip(w->codes + strip * tiles * KT_FP4_TILE,
                            (const uint8_t *)w->scale + strip * tiles * KT_STRIP, tiles);
}

static void stream_groups(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                          int64_t tokens, kt_beside *beside, float *out) {
  const kt_amx_group_form form = {.steps = 1,
                                  .line = KT_AMX_LINE,
                                  .half = KT_BF16_HALF_TILE,
                                  .size = KT_FP4_TILE,
                                  .unpack = unpack_unscaled,
                                  .scales = mxfp4_scales};
  const int64_t tiles = w->cols / KT_TILE_COLS;
  const kt_amx_groups s = {.w = w,
                           .first = {.at = w->codes + strip * tiles * KT_FP4_TILE},
                           .x = x,
                           .strip = strip,
                           .number = tiles,
                           .stride = stride,
                           .out = out};
  kt_amx_stream_groups(form, &s, tiles * KT_FP4_TILE, tokens, beside);
}

/* What one way has unpacked of the next strip is of no use to the other. */
void kt_mxfp4_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                         int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {
      .steps = 1, .size = KT_FP4_TILE, .scale_size = KT_STRIP, .unpack = unpack_mxfp4};
  const int64_t count = w->cols / KT_TILE_COLS * KT_STRIP;
  *sums = kt_sums_of(out, tokens);
  if (w->layout.scale_dtype == KT_SCALE_UE8M0 &&
      kt_powers_within((const uint8_t *)w->scale + strip * count, count, KT_MXFP4_EXACT_FIRST,
                       KT_MXFP4_EXACT_LAST)) {
    kt_amx_stream_unpacked(form, mxfp4_strip, w, strip, x, stride, tokens, NULL, beside, out);
    return;
  }
  beside->ready = NULL;
  stream_groups(w, strip, x, stride, tokens, beside, out);
  beside->ready = NULL;
}

/* ---- NVFP4 ------------------------------------------------------------------- */

KT_INLINE void unpack_nvfp4(kt_amx_codes codes, uint8_t *tiles, const int part) {
  kt_nvfp4_decode_part(codes.at, part, tiles);
}

KT_INLINE kt_amx_strip nvfp4_strip(const kt_weight *w, int64_t strip) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  return kt_amx_whole_strip(w->codes + strip * tiles * KT_NVFP4_TILE, NULL, tiles);
}

void kt_nvfp4_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                         int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {.steps = 1, .size = KT_NVFP4_TILE, .unpack = unpack_nvfp4};
  kt_amx_stream_unpacked(form, nvfp4_strip, w, strip, x, stride, tokens, NULL, beside, out);
  *sums = kt_sums_of(out, tokens);
  sums->row_scale = (const float *)w->scale + strip * KT_STRIP;
}

/* ---- Products ---------------------------------------------------------------- */

KT_AMX_DEFINE_PRODUCT(mxfp4, kt_mxfp4_product_float_avx512)
KT_AMX_DEFINE_PRODUCT(nvfp4, kt_nvfp4_product_float_avx512)

KT_TARGET_END
#endif
