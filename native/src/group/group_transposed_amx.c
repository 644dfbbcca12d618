/* Products with the columns of group INT4 and INT8 weights by AMX (train/transposed_nibbles_amx.h,
 * train/transposed_amx.h): codes times scales, rounded to bf16. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/group_scales_avx512.h"
#include "../train/transposed_nibbles_amx.h"
#include "group.h"

/* Of tiles of codes of `size` bytes. shift: the dtype of scales. */
KT_INLINE kt_packed_square square(int64_t size, const kt_weight *w, int64_t n, int64_t column) {
  return (kt_packed_square){w->codes + kt_bf16_tile_start(w->cols, size, n, column),
                            kt_group_scale_at(w, n, column), w->layout.scale_dtype};
}

/* Scales of a unit, before its first part. */
KT_INLINE void load_scales(kt_unpack_unit *u, int q) {
  if (q != 0) return;
  const int32_t dtype = (int32_t)u->square->shift;
  _mm512_store_ps(u->scale, kt_group_load_scales(dtype, u->square->scale, 16 * u->half));
}

/* ---- GINT4 ------------------------------------------------------------------- */

KT_INLINE kt_packed_square gint4_square(const kt_weight *w, int64_t n, int64_t column) {
  return square(KT_GINT4_TILE, w, n, column);
}

KT_INLINE void gint4_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  load_scales(u, q);
  kt_nibble_part(0, t, u, q);
}

void kt_gint4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.wide = 1, .square = gint4_square, .part = gint4_part};
  static const int order[4] = {0, 1, 2, 3};
  _Alignas(64) float numbers[16];
  for (int i = 0; i < 16; i++) numbers[i] = (float)(i - KT_GINT4_BIAS);
  const kt_unpack_tables tables = kt_nibble_words(order, _mm512_load_ps(numbers));
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

/* ---- GINT8 ------------------------------------------------------------------- */

enum { LINES = 2 * KT_LINE }; /* 4 columns of 32 rows */

KT_INLINE kt_packed_square gint8_square(const kt_weight *w, int64_t n, int64_t column) {
  return square(KT_GINT8_TILE, w, n, column);
}

/* Also what numbers begin with, behind the scales. */
KT_INLINE void load_offsets(kt_unpack_unit *u, int q) {
  load_scales(u, q);
  if (q == 0) _mm512_store_ps(u->scale + 16, kt_group_offset(8, _mm512_load_ps(u->scale)));
}

/* 16 columns of row r of four. */
KT_INLINE __m512 row_of(const int r, __m512i rows, const float *scale) {
  return kt_group_numbers(8, 4 * r, 1, rows, _mm512_set1_ps(scale[r]),
                          _mm512_set1_ps(scale[16 + r]));
}

/* Rows 4q to 4q + 3: two lines of each 16 columns. */
KT_INLINE void gint8_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  load_offsets(u, q);
  const float *const scale = u->scale + 4 * q;
  KT_UNROLL(2)
  for (int j = 0; j < 2; j++) {
    const __m512i rows = kt_four_lines(u->codes + j * 4 * LINES + 16 * q, LINES);
    uint8_t *const to = u->to + j * KT_BF16_HALF_TILE + 2 * q * KT_LINE;
    kt_prefetch_line(u->ahead + (4 * j + q) * LINES);
    KT_UNROLL(2)
    for (int p = 0; p < 2; p++) {
      const __m512 even = row_of(2 * p, rows, scale), odd = row_of(2 * p + 1, rows, scale);
      const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
      _mm512_store_si512(to + p * KT_LINE, _mm512_permutexvar_epi16(t->a, words));
    }
  }
}

void kt_gint8_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {
      .wide = 1, .half_step = KT_LINE, .square = gint8_square, .part = gint8_part};
  const kt_unpack_tables tables = {.a = kt_halves_in_turn()};
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
