/* BF16 products with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/bf16_gemm_amx.h"
#include "bf16.h"

/* A strip for half `half` and, if `both`, the next. Tokens of two halves are written twice, with
 * the same bits. */
KT_INLINE void multiply_halves(const int both, const kt_halves *h, int64_t half,
                               const uint8_t *codes, int64_t tiles, const uint8_t *x,
                               int64_t stride, float *out) {
  const uint8_t *at[2];
  float *to[2];
  for (int i = 0; i < 1 + both; i++) {
    at[i] = x + kt_half_start(h, half + i) * stride;
    to[i] = out + kt_half_start(h, half + i) * KT_STRIP;
  }
  kt_bf16_amx_block(both, codes, tiles, at, stride, to);
}

void kt_bf16_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                         int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  (void)panel;
  const int64_t tiles = w->cols / KT_TILE_COLS;
  const kt_halves h = kt_halves_of(tokens);
  kt_amx_configure_halves(&h, KT_AMX_LINE);
  for (int64_t s = 0; s < strips; s++, out += tokens * KT_STRIP) {
    const uint8_t *const codes = w->codes + (strip + s) * tiles * KT_BF16_TILE;
    int64_t half = 0;
    for (; half + 1 < h.count; half += 2)
      multiply_halves(1, &h, half, codes, tiles, x, stride, out);
    if (half < h.count) multiply_halves(0, &h, half, codes, tiles, x, stride, out);
  }
  _tile_release();
}

KT_TARGET_END
#endif
