/* Products with the columns of MXFP8 weights by AMX (train/transposed_amx.h). Bytes of bf16 are
 * looked up in tables of all magnitudes; scales add to exponents. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_amx.h"
#include "fp8_tables_avx512.h"
#include "mxfp8_pairs_avx512.h"

KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  const int64_t group = column / KT_MXFP8_GROUP;
  return (kt_packed_square){
      w->codes + kt_bf16_tile_start(w->cols, KT_FP8_TILE, n, column),
      (const uint8_t *)w->scale + kt_group_scale_index(w->cols, KT_MXFP8_GROUP, n, group), 0};
}

/* 4 rows, the first two being pair i, of 16 columns, two columns of a line after the other: lines
 * of bf16. */
KT_INLINE void store_rows(const kt_line_tables *tables, const kt_unpack_unit *u, int i,
                          __m512i codes, uint8_t *to) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  const uint8_t *const scale = u->square->scale;
  __m512i line0, line1;
  kt_fp8_lines(tables, _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(order)), &line0, &line1);
  line0 = kt_mxfp8_scaled_line(u->built, scale, u->scale, i, line0);
  line1 = kt_mxfp8_scaled_line(u->built, scale, u->scale, i + 1, line1);
  _mm512_store_si512(to, line0);
  _mm512_store_si512(to + KT_LINE, line1);
}

/* A unit has 32 rows x 16 columns, 8 lines. A part: rows 4q to 4q + 3, and 16 further on. built:
 * whether bf16 holds all products; scale: what scales add then. */
KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  const kt_line_tables tables = {.low0 = t->a, .low64 = t->b, .high0 = t->c, .high64 = t->d};
  if (q == 0) u->built = kt_mxfp8_take_scales(u->square->scale, u->scale);
  const __m512i even = kt_four_lines(u->codes + 16 * q, 2 * KT_LINE);
  const __m512i odd = kt_four_lines(u->codes + 16 * q + KT_LINE, 2 * KT_LINE);
  uint8_t *const to = u->to + 2 * q * KT_LINE;
  kt_prefetch_line(u->ahead + 2 * q * KT_LINE);
  kt_prefetch_line(u->ahead + (2 * q + 1) * KT_LINE);
  store_rows(&tables, u, 2 * q, _mm512_unpacklo_epi64(even, odd), to);
  store_rows(&tables, u, 2 * q + KT_HALF_ROWS / 2, _mm512_unpackhi_epi64(even, odd),
             to + KT_BF16_HALF_TILE / 2);
}

void kt_mxfp8_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {
      .wide = 1, .half_step = 8 * KT_LINE, .by_columns = 1, .square = square, .part = part};
  const kt_line_tables tables = kt_fp8_tables();
  const kt_unpack_tables both = {
      .a = tables.low0, .b = tables.low64, .c = tables.high0, .d = tables.high64};
  kt_transposed_strip(form, &both, 1.0f, t, out);
}

KT_TARGET_END
#endif
