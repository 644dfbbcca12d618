/* Products with the columns of INT8 weights by AMX: codes stay int8 (train/transposed_amx.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_amx.h"
#include "int8.h"

KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  const int64_t k = column / KT_INT8_TILE_COLS * KT_INT8_TILE_COLS;
  const uint8_t *const tile = w->codes + kt_tile_start(w->rows, w->cols, KT_INT8_BLOCK_ROWS, n, k);
  return (kt_packed_square){tile + column % KT_INT8_TILE_COLS / 4 * KT_GROUP_STRIDE, NULL, 0};
}

/* Four rows: a line. */
KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  const __m512i rows = kt_four_lines(u->codes + 16 * q, KT_GROUP_STRIDE);
  kt_prefetch_line(u->ahead + q * KT_GROUP_STRIDE);
  _mm512_store_si512(u->to + q * KT_LINE, _mm512_shuffle_epi8(rows, t->a));
}

void kt_int8_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.int8 = 1,
                                      .half_step = KT_HALF_TILE,
                                      .column = 4 * KT_GROUP_STRIDE,
                                      .square = square,
                                      .part = part};
  const kt_unpack_tables tables = {.a = kt_rows_to_columns()};
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
