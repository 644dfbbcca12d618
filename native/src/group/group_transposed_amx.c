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

/* 16 columns of row r of four. */
KT_INLINE __m512 row_of(__m512i rows, int r, float scale) {
  const __m512i first = _mm512_broadcast_i32x4(
      _mm_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3));
  const __m512i sign = _mm512_set1_epi32((int)0x80000000), step = _mm512_set1_epi32(r << 26);
  const __m512i order = _mm512_mask_add_epi8(first, 0x8888888888888888u, first, step);
  const __m512i upper = _mm512_xor_si512(_mm512_shuffle_epi8(rows, order), sign);
  const __m512 code = _mm512_cvtepi32_ps(_mm512_srai_epi32(upper, 24));
  return _mm512_mul_ps(code, _mm512_set1_ps(scale));
}

/* Rows 4q to 4q + 3: two lines of each 16 columns. */
KT_INLINE void gint8_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  load_scales(u, q);
  const float *const scale = u->scale + 4 * q;
  KT_UNROLL(2)
  for (int j = 0; j < 2; j++) {
    const __m512i rows = kt_four_lines(u->codes + j * 4 * LINES + 16 * q, LINES);
    uint8_t *const to = u->to + j * KT_BF16_HALF_TILE + 2 * q * KT_LINE;
    kt_prefetch_line(u->ahead + (4 * j + q) * LINES);
    KT_UNROLL(2)
    for (int p = 0; p < 2; p++) {
      const __m512 even = row_of(rows, 2 * p, scale[2 * p]);
      const __m512 odd = row_of(rows, 2 * p + 1, scale[2 * p + 1]);
      const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
      _mm512_store_si512(to + p * KT_LINE, _mm512_permutexvar_epi16(t->a, words));
    }
  }
}

/* Words of the lower and the upper half in turn. */
KT_INLINE __m512i halves_in_turn(void) {
  _Alignas(64) uint16_t order[32];
  for (int i = 0; i < 32; i++) order[i] = (uint16_t)(i / 2 + i % 2 * 16);
  return _mm512_load_si512(order);
}

void kt_gint8_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {
      .wide = 1, .half_step = KT_LINE, .square = gint8_square, .part = gint8_part};
  const kt_unpack_tables tables = {.a = halves_in_turn()};
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
