/* MXFP4 products with AMX.
 *
 * A K block whose scales are powers of two that bf16 can take in is decoded with them and summed
 * as one group. Others (bf16 scales, the outermost powers of two) keep groups of 32 columns: a tile
 * each, whose sums are scaled and added as with AVX-512. Which of the two depends on the weights
 * alone. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/bf16_gemm_amx.h"
#include "mxfp4.h"

enum { LEAST_TOKENS = 5 }; /* see amx_tiles.h */

/* Whether bf16 holds the numbers of all codes times each of these scales. */
static int are_exact(const uint8_t *scale, int64_t count) {
  const __m512i first = _mm512_set1_epi8(KT_MXFP4_EXACT_FIRST);
  const __m512i last = _mm512_set1_epi8((char)KT_MXFP4_EXACT_LAST);
  __mmask64 outside = 0;
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 there = count - i < 64 ? 0xffffffff : ~(__mmask64)0; /* count: strips of 32 */
    const __m512i v = _mm512_maskz_loadu_epi8(there, scale + i);
    outside |= _mm512_mask_cmplt_epu8_mask(there, v, first) | _mm512_cmpgt_epu8_mask(v, last);
  }
  return outside == 0;
}

static void decode(const kt_weight *w, int64_t strip, int64_t k, int64_t cols, kt_decoded *out) {
  const int64_t row = strip * KT_STRIP, tiles = cols / KT_TILE_COLS, count = tiles * KT_STRIP;
  const uint8_t *const codes = w->codes + kt_bf16_tile_start(w->cols, KT_FP4_TILE, row, k);
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP4_GROUP, row, k / KT_MXFP4_GROUP);
  const uint8_t *const scale = (const uint8_t *)w->scale + at;
  if (w->layout.scale_dtype == KT_SCALE_UE8M0 && are_exact(scale, count)) {
    kt_mxfp4_decode_tiles(codes, scale, tiles, out->tiles);
    for (int r = 0; r < KT_STRIP; r++) out->scale[r] = 1.0f;
    out->groups = 1;
  } else {
    kt_mxfp4_decode_tiles(codes, NULL, tiles, out->tiles);
    kt_mxfp4_decode_scales(w, at, count, out->scale);
    out->groups = tiles;
  }
  out->group_tiles = tiles / out->groups;
}

void kt_mxfp4_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                          int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  if (tokens < LEAST_TOKENS)
    kt_mxfp4_product_float_avx512(w, strip, strips, x, stride, tokens, out, panel);
  else
    kt_bf16_decoded_product(decode, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
