/* Products with the columns of group INT4 weights by AMX (train/transposed_nibbles_amx.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_nibbles_amx.h"
#include "gint4.h"

/* shift: the dtype of scales. */
KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  return (kt_packed_square){w->codes + kt_bf16_tile_start(w->cols, KT_GINT4_TILE, n, column),
                            kt_group_scale_at(w, n, column), w->layout.scale_dtype};
}

KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0)
    _mm512_store_ps(u->scale, kt_load_scales(u->square->scale, u->square->shift, 16 * u->half));
  kt_nibble_part(0, t, u, q);
}

void kt_gint4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.wide = 1, .square = square, .part = part};
  static const int order[4] = {0, 1, 2, 3};
  _Alignas(64) float numbers[16];
  for (int i = 0; i < 16; i++) numbers[i] = (float)(i - KT_GINT4_BIAS);
  const kt_unpack_tables tables = kt_nibble_words(order, _mm512_load_ps(numbers));
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
