/* group_gemm_amx.h - products with integers in groups of columns with AMX, by TDPBSSD: the same
 * integers and the same float operations as with AVX-512, so the same bits.
 *
 * A group is two steps of 64 columns, one of 64, or one of 32. For the last, tiles are configured
 * for 32 bytes of columns. Filling them up with zeros would need no fewer products, and a second
 * group in a tile cannot be used, its sums being apart; a narrow tile of weights takes half the
 * load and half the room.
 *
 * `bits` and `group` are constants in every call. Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_GROUP_GEMM_AMX_H
#define KT_GROUP_GEMM_AMX_H

#include "amx_groups.h"
#include "group_scales_avx512.h"

/* Lines of 4 columns: rows 0..15 go to a line of the first half tile, 16..31 to one of the second.
 */
KT_INLINE void kt_group_unpack(const int bits, const int lines, const int half_lines,
                               const uint8_t *codes, uint8_t *tiles, const int part) {
  const __m512i low = _mm512_set1_epi8(15), bias = _mm512_set1_epi8((char)KT_GROUP_BIAS(bits));
  KT_UNROLL(4)
  for (int line = lines * part; line < lines * (part + 1); line++) {
    const uint8_t *const from = codes + line * (bits / 4) * KT_LINE;
    uint8_t *const to = tiles + (line / half_lines * 2 * half_lines + line % half_lines) * KT_LINE;
    const __m512i v = _mm512_loadu_si512(from);
    const __m512i w0 = bits == 4 ? _mm512_and_si512(v, low) : v;
    const __m512i w1 = bits == 4 ? _mm512_and_si512(_mm512_srli_epi16(v, 4), low)
                                 : _mm512_loadu_si512(from + KT_LINE);
    _mm512_store_si512(to, _mm512_sub_epi8(w0, bias));
    _mm512_store_si512(to + half_lines * KT_LINE, _mm512_sub_epi8(w1, bias));
  }
}

KT_INLINE void kt_group_add_sums(const kt_amx_groups *s, int64_t g, int64_t first, int64_t end,
                                 const void *sums) {
  const int32_t dtype = s->w->layout.scale_dtype, *from = sums;
  const int64_t at = (s->strip * s->number + g) * KT_STRIP;
  const __m512 scale0 = kt_group_load_scales(dtype, s->w->scale, at);
  const __m512 scale1 = kt_group_load_scales(dtype, s->w->scale, at + 16);
  const uint8_t *const scales = (const uint8_t *)(kt_group_x_scale(s->x, s->w->cols) + g);
  for (int64_t t = first; t < end; t++, from += KT_STRIP) {
    float one;
    __builtin_memcpy(&one, scales + t * s->stride, sizeof one);
    const __m512 x_scale = _mm512_set1_ps(one);
    float *const to = s->out + t * KT_STRIP;
    const __m512i sum0 = _mm512_load_si512(from), sum1 = _mm512_load_si512(from + 16);
    _mm512_store_ps(to, kt_group_add(_mm512_load_ps(to), sum0, scale0, x_scale));
    _mm512_store_ps(to + 16, kt_group_add(_mm512_load_ps(to + 16), sum1, scale1, x_scale));
  }
}

#define KT_GROUP_UNPACK(bits, group)                                                               \
  KT_INLINE void unpack_##group(kt_amx_codes codes, uint8_t *tiles, const int part) {              \
    kt_group_unpack(bits, group == 128 ? 4 : group / 16, group == 32 ? 8 : 16, codes.at, tiles,    \
                    part);                                                                         \
  }

KT_INLINE void kt_group_stream(const int bits, const int group, kt_amx_unpack_fn *unpack,
                               const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                               int64_t tokens, kt_beside *beside, float *out) {
  const kt_amx_group_form form = {.int8 = 1,
                                  .steps = group == 128 ? 2 : 1,
                                  .line = group == 32 ? 32 : 64,
                                  .half = group == 32 ? 512 : 1024,
                                  .size = KT_STRIP * group * bits / 8,
                                  .unpack = unpack,
                                  .add = kt_group_add_sums};
  const int64_t size = w->cols / KT_TILE_COLS * KT_GROUP_TILE(bits);
  const kt_amx_groups s = {.w = w,
                           .codes = w->codes + strip * size,
                           .x = x,
                           .strip = strip,
                           .number = w->cols / group,
                           .stride = stride,
                           .out = out};
  kt_amx_stream_groups(form, &s, size, tokens, beside);
}

/* Defines the format's kt_stream_fn `stream`. */
#define KT_GROUP_STREAM(bits, stream)                                                              \
  KT_GROUP_UNPACK(bits, 32)                                                                        \
  KT_GROUP_UNPACK(bits, 64)                                                                        \
  KT_GROUP_UNPACK(bits, 128)                                                                       \
  void stream(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride, int64_t tokens, \
              kt_beside *beside, void *out, kt_sums *sums) {                                       \
    switch (w->layout.group) {                                                                     \
    case 32: kt_group_stream(bits, 32, unpack_32, w, strip, x, stride, tokens, beside, out);       \
        break;                                                                                     \
    case 64: kt_group_stream(bits, 64, unpack_64, w, strip, x, stride, tokens, beside, out);       \
        break;                                                                                     \
    default: kt_group_stream(bits, 128, unpack_128, w, strip, x, stride, tokens, beside, out);     \
    }                                                                                              \
    *sums = kt_sums_of(out, tokens);                                                               \
  }

#endif
