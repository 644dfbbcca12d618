/* Products with the columns of INT8 and INT4 weights by AMX (train/transposed_amx.h): codes stay
 * int8; those of INT4 are 16 times the weights'. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_amx.h"
#include "int.h"

/* ---- INT8 -------------------------------------------------------------------- */

KT_INLINE kt_packed_square int8_square(const kt_weight *w, int64_t n, int64_t column) {
  const int64_t k = column / KT_INT8_TILE_COLS * KT_INT8_TILE_COLS;
  const uint8_t *const tile = w->codes + kt_tile_start(w->rows, w->cols, KT_INT8_BLOCK_ROWS, n, k);
  return (kt_packed_square){tile + column % KT_INT8_TILE_COLS / 4 * KT_GROUP_STRIDE, NULL, 0};
}

/* Four rows: a line. */
KT_INLINE void int8_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  const __m512i rows = kt_four_lines(u->codes + 16 * q, KT_GROUP_STRIDE);
  kt_prefetch_line(u->ahead + q * KT_GROUP_STRIDE);
  _mm512_store_si512(u->to + q * KT_LINE, _mm512_shuffle_epi8(rows, t->a));
}

/* ---- INT4 -------------------------------------------------------------------- */

/* shift: from the nibble of the columns to the upper one. */
KT_INLINE kt_packed_square int4_square(const kt_weight *w, int64_t n, int64_t column) {
  const int64_t half = KT_INT4_TILE_COLS / 2, k = column / KT_INT4_TILE_COLS * KT_INT4_TILE_COLS;
  const int64_t codes = kt_tile_start(w->rows, w->cols, KT_INT4_BLOCK_ROWS, n, k);
  return (kt_packed_square){w->codes + codes / 2 + column % half / 4 * KT_GROUP_STRIDE, NULL,
                            column - k < half ? 4 : 0};
}

/* Four rows: a line. */
KT_INLINE void int4_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  const __m512i rows = kt_four_lines(u->codes + 16 * q, KT_GROUP_STRIDE);
  if (q == 0) u->kept[0] = _mm512_set1_epi16((int16_t)u->square->shift);
  const __m512i codes = _mm512_and_si512(_mm512_sllv_epi16(rows, u->kept[0]), t->b);
  kt_prefetch_line(u->ahead + q * KT_GROUP_STRIDE);
  _mm512_store_si512(u->to + q * KT_LINE, _mm512_shuffle_epi8(codes, t->a));
}

/* ---- Both -------------------------------------------------------------------- */

#define FORM(of_square, of_part)                                                                   \
  {.int8 = 1,                                                                                      \
   .plain = 1,                                                                                     \
   .half_step = KT_HALF_TILE,                                                                      \
   .column = 4 * KT_GROUP_STRIDE,                                                                  \
   .square = of_square,                                                                            \
   .part = of_part}

void kt_int8_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = FORM(int8_square, int8_part);
  const kt_unpack_tables tables = {.a = kt_rows_to_columns()};
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

void kt_int4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = FORM(int4_square, int4_part);
  const kt_unpack_tables tables = {.a = kt_rows_to_columns(), .b = _mm512_set1_epi8((char)0xf0)};
  kt_transposed_strip(form, &tables, 0.0625f, t, out);
}

KT_TARGET_END
#endif
