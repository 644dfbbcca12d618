/* Products with group INT4 and INT8 weights by AMX in bf16, for fine-tuning: codes times scales,
 * rounded to bf16, times bf16 rows. Sums stay in the tiles over all groups, where those of integers
 * leave them with each group of 32 or 64 columns, which takes longer than the products. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_blocks.h"
#include "../gemm/group_scales_avx512.h"
#include "group.h"

/* A strip: its codes, and the scales of its first group. A scale belongs to 1 << shift tiles. */
typedef struct kt_rounded_strip {
  const uint8_t *codes, *scale;
  int32_t dtype, shift;
} kt_rounded_strip;

KT_INLINE kt_rounded_strip strip_of(const int bits, const kt_weight *w, int64_t strip) {
  const int64_t group = w->layout.group, at = strip * (w->cols / group) * KT_STRIP;
  const int64_t size = w->layout.scale_dtype == KT_SCALE_F32 ? 4 : 2;
  return (kt_rounded_strip){w->codes + strip * (w->cols / KT_TILE_COLS) * KT_GROUP_TILE(bits),
                            (const uint8_t *)w->scale + at * size, w->layout.scale_dtype,
                            group == 32   ? 0
                            : group == 64 ? 1
                                          : 2};
}

/* Four columns of 16 rows: two lines. */
KT_INLINE void store_lines(const int bits, __m512i codes, __m512 scale, __m512 offset,
                           uint8_t *to) {
  KT_UNROLL(2)
  for (int line = 0; line < 2; line++) {
    const __m512 even = kt_group_numbers(bits, 2 * line, 4, codes, scale, offset);
    const __m512 odd = kt_group_numbers(bits, 2 * line + 1, 4, codes, scale, offset);
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_store_si512(to + line * KT_LINE, _mm512_permutexvar_epi16(kt_halves_in_turn(), both));
  }
}

/* A quarter of a tile; in the place of scales is the strip. */
KT_INLINE void unpack(const int bits, kt_amx_codes codes, uint8_t *tiles, const int part) {
  const kt_rounded_strip *const s = (const void *)codes.scale;
  const int64_t group = (codes.at - s->codes) / KT_GROUP_TILE(bits) >> s->shift;
  const __m512i low = _mm512_set1_epi8(0x0f);
  __m512 scale[2], offset[2];
  KT_UNROLL(2)
  for (int half = 0; half < 2; half++) {
    scale[half] = kt_group_load_scales(s->dtype, s->scale, group * KT_STRIP + half * KT_HALF_ROWS);
    offset[half] = kt_group_offset(bits, scale[half]);
  }
  KT_UNROLL(2)
  for (int i = 2 * part; i < 2 * part + 2; i++) {
    const uint8_t *const from = codes.at + i * (bits / 4) * KT_LINE;
    const __m512i v = _mm512_loadu_si512(from);
    const __m512i first = bits == 4 ? _mm512_and_si512(v, low) : v;
    const __m512i second = bits == 4 ? _mm512_and_si512(_mm512_srli_epi16(v, 4), low)
                                     : _mm512_loadu_si512(from + KT_LINE);
    store_lines(bits, first, scale[0], offset[0], tiles + 2 * i * KT_LINE);
    store_lines(bits, second, scale[1], offset[1], tiles + KT_BF16_HALF_TILE + 2 * i * KT_LINE);
  }
}

KT_INLINE void stream(const int bits, kt_amx_unpack_fn *unpack_part, const kt_weight *w,
                      int64_t strip, const uint8_t *x, int64_t stride, int64_t tokens,
                      kt_beside *beside, float *out) {
  const kt_amx_group_form form = {.size = KT_GROUP_TILE(bits), .unpack = unpack_part};
  const kt_weight *const next = beside->following ? beside->following : w;
  const kt_rounded_strip own = strip_of(bits, w, strip);
  const kt_rounded_strip following =
      beside->following ? strip_of(bits, next, beside->following_strip) : own;
  const kt_amx_groups s = {
      .w = w, .first = {own.codes, (const uint8_t *)&own}, .x = x, .stride = stride, .out = out};
  const kt_amx_codes then = {following.codes, (const uint8_t *)&following};
  kt_amx_stream_blocks(form, &s, w->cols / KT_TILE_COLS, then, next->cols / KT_TILE_COLS, tokens,
                       beside);
}

#define DEFINE(format, bits)                                                                       \
  KT_INLINE void unpack_##format(kt_amx_codes codes, uint8_t *tiles, const int part) {             \
    unpack(bits, codes, tiles, part);                                                              \
  }                                                                                                \
  static void stream_##format(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride, \
                              int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {       \
    stream(bits, unpack_##format, w, strip, x, stride, tokens, beside, out);                       \
    *sums = kt_sums_of(out, tokens);                                                               \
  }                                                                                                \
  const kt_rounded kt_##format##_rounded_amx = {stream_##format, 64};

DEFINE(gint4, 4)
DEFINE(gint8, 8)

KT_TARGET_END
#endif
