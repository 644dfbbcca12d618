/* int_gemm_amx.h - products with INT8 and INT4 in KTransformers' layout, by TDPBSSD.
 *
 * A half tile of INT8 is a B tile as it is: 16 groups of 4 columns x 16 rows. Codes of INT4 become
 * bytes of 16 times their value, which takes no subtraction: |16 * 8 * 127| allows 130 000 columns.
 * Shifting the sums right by 4 gives the same integers as everywhere.
 *
 * `int4` is a constant in every call. Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_INT_GEMM_AMX_H
#define KT_INT_GEMM_AMX_H

#include "amx_stream.h"
#include "int_gemm.h"

/* Lines 4 part .. 4 part + 3 of a tile of 128 columns as two of 64: columns in low nibbles, then
 * those in high ones. */
KT_INLINE void kt_int4_unpack(kt_amx_codes codes, uint8_t *tiles, const int part) {
  const __m512i upper = _mm512_set1_epi8((char)0xf0);
  KT_UNROLL(4)
  for (int line = 4 * part; line < 4 * part + 4; line++) {
    const __m512i v = _mm512_loadu_si512(codes.at + line * KT_AMX_LINE);
    _mm512_store_si512(tiles + line * KT_AMX_LINE,
                       _mm512_and_si512(_mm512_slli_epi16(v, 4), upper));
    _mm512_store_si512(tiles + KT_AMX_TILES + line * KT_AMX_LINE, _mm512_and_si512(v, upper));
  }
}

/* A run for each column block of the layout. */
KT_INLINE kt_amx_strip kt_int_amx_strip(const int int4, int64_t block_rows, const kt_weight *w,
                                        int64_t strip) {
  kt_amx_strip found;
  found.runs = 0;
  for (int64_t k = 0; k < w->cols; k += KT_COL_BLOCK) {
    const int64_t cols = w->cols - k < KT_COL_BLOCK ? w->cols - k : KT_COL_BLOCK;
    const int64_t start = kt_tile_start(w->rows, w->cols, block_rows, strip * KT_STRIP, k);
    found.run[found.runs] = (kt_amx_codes){.at = w->codes + (int4 ? start / 2 : start)};
    found.slots[found.runs++] = cols / (int4 ? 128 : 64);
  }
  return found;
}

KT_INLINE void kt_int_amx_sums(const int int4, const kt_weight *w, int64_t strip, const uint8_t *x,
                               int64_t stride, int64_t tokens, const void *out, kt_sums *sums) {
  *sums = (kt_sums){.sum = out,
                    .whole = 1,
                    .shift = int4 ? 4 : 0,
                    .step = int4 ? 16.0f : 1.0f,
                    .tokens = tokens,
                    .row_scale = (const float *)w->scale + strip * KT_STRIP,
                    .x_scale = x + w->cols,
                    .stride = stride};
}

#endif
