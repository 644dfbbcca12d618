/* Products of strips that are added to what is there, with AMX. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../bf16/bf16.h"
#include "../gemm/amx_stream.h"

/* 16 or fewer tokens, and of `both` as many more; 32 floats each. */
KT_INLINE void load_sums(const int both, float *const sums[2]) {
  enum { LINE = 2 * KT_AMX_LINE };
  __asm__ volatile("" ::: "memory");
  _tile_loadd(0, sums[0], LINE);
  _tile_loadd(1, sums[0] + KT_AMX_ROWS, LINE);
  if (!both) return;
  _tile_loadd(2, sums[1], LINE);
  _tile_loadd(3, sums[1] + KT_AMX_ROWS, LINE);
}

/* Both halves are loaded before one of them is stored, so tokens of both get the same bits. */
KT_INLINE void add_halves(const int both, const kt_halves *h, int64_t half, const uint8_t *codes,
                          int64_t tiles, const uint8_t *x, int64_t stride, float *out) {
  const uint8_t *at[2] = {NULL, NULL};
  float *to[2] = {NULL, NULL};
  for (int i = 0; i < 1 + both; i++) {
    at[i] = x + kt_half_start(h, half + i) * stride;
    to[i] = out + kt_half_start(h, half + i) * KT_STRIP;
  }
  load_sums(both, to);
  for (int64_t i = 0; i < tiles; i++, codes += KT_BF16_TILE) {
    const uint8_t *const halves[2] = {codes, codes + KT_BF16_HALF_TILE};
    const uint8_t *const a[2] = {at[0] + i * KT_AMX_LINE, both ? at[1] + i * KT_AMX_LINE : NULL};
    kt_amx_multiply(0, both, halves, a, stride);
  }
  void *const sums[2] = {to[0], to[1]};
  kt_amx_store_sums(both, sums);
}

/* A last half that is alone begins with sums that the half before it has stored already: what they
 * were is put back. */
KT_INLINE void add_strip(const kt_halves *h, const kt_weight *w, int64_t strip, const uint8_t *x,
                         int64_t stride, float *out) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  const uint8_t *const codes = w->codes + strip * tiles * KT_BF16_TILE;
  const int64_t last = kt_half_start(h, h->count - 1), alone = h->count > 1 && h->count % 2;
  const int64_t twice = alone ? kt_half_new(h, h->count - 1) - last : 0;
  const size_t size = (size_t)(twice * KT_STRIP) * sizeof *out;
  float kept[KT_AMX_ROWS * KT_STRIP];
  int64_t half = 0;
  __builtin_memcpy(kept, out + last * KT_STRIP, size);
  for (; half + 1 < h->count; half += 2) add_halves(1, h, half, codes, tiles, x, stride, out);
  if (half == h->count) return;
  __builtin_memcpy(out + last * KT_STRIP, kept, size);
  add_halves(0, h, half, codes, tiles, x, stride, out);
}

void kt_bf16_adding_product_amx(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                                int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  (void)panel;
  const kt_halves h = kt_halves_of(tokens);
  kt_amx_configure_halves(&h, KT_AMX_LINE);
  for (int64_t s = 0; s < strips; s++, out += tokens * KT_STRIP)
    add_strip(&h, w, strip + s, x, stride, out);
  _tile_release();
}

void kt_bf16_adding_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                               int64_t tokens, kt_beside *beside, float *out) {
  const kt_halves h = kt_halves_of(tokens);
  kt_amx_prepare(beside, &h, KT_AMX_LINE);
  add_strip(&h, w, strip, x, stride, out);
}

KT_TARGET_END
#endif
