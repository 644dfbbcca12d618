/* Products with integers in groups of columns with AMX, by TDPBSSD: the same integers and the same
 * float operations as with AVX-512, so the same bits.
 *
 * A group is two steps of 64 columns, one of 64, or one of 32. For the last, tiles are configured
 * for 32 bytes of columns. Filling them up with zeros would need no fewer products, and a second
 * group in a tile cannot be used, its sums being apart; a narrow tile of weights takes half the
 * load and half the room.
 *
 * `bits` and `group` are constants in every call. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_groups.h"
#include "../gemm/group_scales_avx512.h"
#include "group.h"

/* Nibbles less 8 as bytes: bits 0..2 stay, and the others are the opposite of bit 3, so a matrix of
 * bits makes them with one instruction for low nibbles and one for high ones. */
#define KT_GROUP_LOW_NIBBLES 0x0102040808080808
#define KT_GROUP_HIGH_NIBBLES 0x1020408080808080
enum { KT_GROUP_OPPOSITE = 0xf8 };

/* Lines of 4 columns: rows 0..15 go to a line of the first half tile, 16..31 to one of the second.
 */
KT_INLINE void kt_group_unpack(const int bits, const int lines, const int half_lines,
                               const uint8_t *codes, uint8_t *tiles, const int part) {
  const __m512i low = _mm512_set1_epi64(KT_GROUP_LOW_NIBBLES);
  const __m512i high = _mm512_set1_epi64(KT_GROUP_HIGH_NIBBLES);
  const __m512i bias = _mm512_set1_epi8((char)KT_GROUP_BIAS(8));
  KT_UNROLL(4)
  for (int line = lines * part; line < lines * (part + 1); line++) {
    const uint8_t *const from = codes + line * (bits / 4) * KT_LINE;
    uint8_t *const to = tiles + (line / half_lines * 2 * half_lines + line % half_lines) * KT_LINE;
    const __m512i v = _mm512_loadu_si512(from);
    const __m512i w0 = bits == 4 ? _mm512_gf2p8affine_epi64_epi8(v, low, KT_GROUP_OPPOSITE)
                                 : _mm512_xor_si512(v, bias);
    const __m512i w1 = bits == 4 ? _mm512_gf2p8affine_epi64_epi8(v, high, KT_GROUP_OPPOSITE)
                                 : _mm512_xor_si512(_mm512_loadu_si512(from + KT_LINE), bias);
    _mm512_store_si512(to, w0);
    _mm512_store_si512(to + half_lines * KT_LINE, w1);
  }
}

KT_INLINE void kt_group_amx_scales(const kt_amx_groups *s, int64_t g, __m512 scale[2]) {
  const int64_t at = (s->strip * s->number + g) * KT_STRIP;
  const int32_t dtype = s->w->layout.scale_dtype;
  scale[0] = kt_group_load_scales(dtype, s->w->scale, at);
  scale[1] = kt_group_load_scales(dtype, s->w->scale, at + 16);
}

#define UNPACK(bits, group)                                                                        \
  KT_INLINE void unpack_##bits##_##group(kt_amx_codes codes, uint8_t *tiles, const int part) {     \
    kt_group_unpack(bits, group == 32 ? 2 : 4, group == 32 ? 8 : 16, codes.at, tiles, part);       \
  }

KT_INLINE void kt_group_stream(const int bits, const int group, kt_amx_unpack_fn *unpack,
                               const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                               int64_t tokens, kt_beside *beside, float *out) {
  const kt_amx_group_form form = {.int8 = 1,
                                  .steps = group == 128 ? 2 : 1,
                                  .line = group == 32 ? 32 : 64,
                                  .half = group == 32 ? 512 : 1024,
                                  .size = KT_STRIP * (group == 32 ? 32 : 64) * bits / 8,
                                  .unpack = unpack,
                                  .scales = kt_group_amx_scales};
  const int64_t size = w->cols / KT_TILE_COLS * KT_GROUP_TILE(bits);
  const kt_amx_groups s = {.w = w,
                           .first = {.at = w->codes + strip * size},
                           .x = x,
                           .x_scale = (const uint8_t *)kt_group_x_scale(x, w->cols),
                           .strip = strip,
                           .number = w->cols / group,
                           .stride = stride,
                           .out = out};
  kt_amx_stream_groups(form, &s, size, tokens, beside);
}

#define STREAM(bits, group)                                                                        \
  kt_group_stream(bits, group, unpack_##bits##_##group, w, strip, x, stride, tokens, beside, out)

/* Defines the kt_stream_fn and kt_product_fn of a format. */
#define DEFINE(format, bits)                                                                       \
  UNPACK(bits, 32)                                                                                 \
  UNPACK(bits, 64)                                                                                 \
  UNPACK(bits, 128)                                                                                \
  void kt_##format##_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x,               \
                                int64_t stride, int64_t tokens, kt_beside *beside, void *out,      \
                                kt_sums *sums) {                                                   \
    switch (w->layout.group) {                                                                     \
    case 32: STREAM(bits, 32); break;                                                              \
    case 64: STREAM(bits, 64); break;                                                              \
    default: STREAM(bits, 128);                                                                    \
    }                                                                                              \
    *sums = kt_sums_of(out, tokens);                                                               \
  }                                                                                                \
  KT_AMX_DEFINE_PRODUCT(format, kt_##format##_product_avx512)

DEFINE(gint4, 4)
DEFINE(gint8, 8)

KT_TARGET_END
#endif
