/* INT8 and INT4 products with AMX, by TDPBSSD.
 *
 * A half tile of INT8 is a B tile as it is: 16 groups of 4 columns x 16 rows. Codes of INT4 become
 * bytes of 16 times their value, which takes no subtraction: |16 * 8 * 127| allows 130 000 columns.
 * Shifting the sums right by 4 gives the same integers as everywhere.
 *
 * `int4` is a constant in every call. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_stream.h"
#include "../gemm/int_gemm.h"
#include "int.h"

/* Lines 4 part .. 4 part + 3 of a tile of 128 columns as two of 64: columns in low nibbles, then
 * those in high ones. */
KT_INLINE void unpack_int4(kt_amx_codes codes, uint8_t *tiles, const int part) {
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
KT_INLINE kt_amx_strip strip_of(const int int4, const kt_weight *w, int64_t strip) {
  const int64_t block_rows = int4 ? KT_INT4_BLOCK_ROWS : KT_INT8_BLOCK_ROWS;
  kt_amx_strip found;
  found.runs = 0;
  for (int64_t k = 0; k < w->cols; k += KT_COL_BLOCK) {
    const int64_t cols = w->cols - k < KT_COL_BLOCK ? w->cols - k : KT_COL_BLOCK;
    const int64_t start = kt_tile_start(w->rows, w->cols, block_rows, strip * KT_STRIP, k);
    found.run[found.runs] = (kt_amx_codes){.at = w->codes + (int4 ? start / 2 : start)};
    found.slots[found.runs++] = cols / (int4 ? KT_INT4_TILE_COLS : KT_INT8_TILE_COLS);
  }
  return found;
}

KT_INLINE kt_sums sums_of(const int int4, const kt_weight *w, int64_t strip, const uint8_t *x,
                          int64_t stride, int64_t tokens, const void *out) {
  return (kt_sums){.sum = out,
                   .whole = 1,
                   .shift = int4 ? 4 : 0,
                   .step = int4 ? 16.0f : 1.0f,
                   .tokens = tokens,
                   .row_scale = (const float *)w->scale + strip * KT_STRIP,
                   .x_scale = x + w->cols,
                   .stride = stride};
}

/* Defines the kt_stream_fn and kt_product_fn of a format. */
#define DEFINE(format, is_int4, form)                                                              \
  KT_INLINE kt_amx_strip format##_strip(const kt_weight *w, int64_t strip) {                       \
    return strip_of(is_int4, w, strip);                                                            \
  }                                                                                                \
  void kt_##format##_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x,               \
                                int64_t stride, int64_t tokens, kt_beside *beside, void *out,      \
                                kt_sums *sums) {                                                   \
    kt_amx_stream(form, format##_strip, w, strip, x, stride, tokens, NULL, beside, out);           \
    *sums = sums_of(is_int4, w, strip, x, stride, tokens, out);                                    \
  }                                                                                                \
  KT_AMX_DEFINE_PRODUCT(format, kt_##format##_product_avx512)

#define INT8_FORM ((kt_amx_form){.int8 = 1, .steps = 1, .size = KT_AMX_TILES})
#define INT4_FORM                                                                                  \
  ((kt_amx_form){.int8 = 1, .steps = 2, .size = KT_AMX_TILES, .unpack = unpack_int4})
DEFINE(int8, 0, INT8_FORM)
DEFINE(int4, 1, INT4_FORM)

KT_TARGET_END
#endif
