/* Products with the columns of FP8 weights by AMX (train/transposed_amx.h). Bytes of bf16 are
 * looked up in tables of all magnitudes, multiplied by the scale of a block; scales of rows are in
 * the activations. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_amx.h"
#include "fp8_tables_avx512.h"

#include <string.h>

KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  static const float one = 1.0f;
  const int64_t block = n / KT_STRIP * (w->cols / KT_FP8_BLOCK) + column / KT_FP8_BLOCK;
  return (kt_packed_square){w->codes + kt_bf16_tile_start(w->cols, KT_FP8_TILE, n, column),
                            w->layout.group ? (const float *)w->scale + block : &one, 0};
}

/* 32 magnitudes from `first` on, times scale, as bf16. */
KT_INLINE __m512i scaled(int first, __m512 scale) {
  const __m512i bits = _mm512_loadu_si512(kt_e4m3_bf16 + first);
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(bits, 1));
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(low, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_slli_epi32(high, 16));
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(odd, scale), _mm512_mul_ps(even, scale));
}

/* Lower bytes of 64 magnitudes, of the others; upper bytes of both. t: a, b: the places of lower
 * and of upper bytes in two vectors. */
KT_NOINLINE kt_unpack_tables make_tables(const kt_unpack_tables t, float own) {
  const __m512 scale = _mm512_set1_ps(own);
  const __m512i w[4] = {scaled(0, scale), scaled(32, scale), scaled(64, scale), scaled(96, scale)};
  return (kt_unpack_tables){.a = _mm512_permutex2var_epi8(w[0], t.a, w[1]),
                            .b = _mm512_permutex2var_epi8(w[2], t.a, w[3]),
                            .c = _mm512_permutex2var_epi8(w[0], t.b, w[1]),
                            .d = _mm512_permutex2var_epi8(w[2], t.b, w[3])};
}

/* 4 rows of 16 columns, two columns of a line after the other: lines of bf16. */
KT_INLINE void store_rows(const kt_unpack_tables *t, const __m512i kept[4], __m512i codes,
                          uint8_t *to) {
  const __m512i v = _mm512_shuffle_epi8(codes, t->c);
  const __m512i low = _mm512_permutex2var_epi8(kept[0], v, kept[1]);
  const __m512i high = _mm512_permutex2var_epi8(kept[2], v, kept[3]);
  const __m512i upper = _mm512_ternarylogic_epi32(high, v, t->d, 0x78); /* high ^ v & sign */
  _mm512_store_si512(to, _mm512_unpacklo_epi8(low, upper));
  _mm512_store_si512(to + KT_LINE, _mm512_unpackhi_epi8(low, upper));
}

/* A unit has 32 rows x 16 columns, 8 lines. A part: rows 4q to 4q + 3, and 16 further on. Tables
 * are made again where a scale is another. */
KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0) {
    const float *const scale = u->square->scale;
    if (!u->built || memcmp(scale, u->scale, sizeof *scale) != 0) {
      *u->scale = *scale, u->built = 1;
      const kt_unpack_tables made = make_tables(*t, *scale);
      u->kept[0] = made.a, u->kept[1] = made.b, u->kept[2] = made.c, u->kept[3] = made.d;
    }
  }
  const __m512i even = kt_four_lines(u->codes + 16 * q, 2 * KT_LINE);
  const __m512i odd = kt_four_lines(u->codes + 16 * q + KT_LINE, 2 * KT_LINE);
  uint8_t *const to = u->to + 2 * q * KT_LINE;
  kt_prefetch_line(u->ahead + 2 * q * KT_LINE);
  kt_prefetch_line(u->ahead + (2 * q + 1) * KT_LINE);
  store_rows(t, u->kept, _mm512_unpacklo_epi64(even, odd), to);
  store_rows(t, u->kept, _mm512_unpackhi_epi64(even, odd), to + KT_BF16_HALF_TILE / 2);
}

/* Every second byte of two vectors. */
KT_INLINE __m512i every_second(int first) {
  _Alignas(64) uint8_t order[64];
  for (int i = 0; i < 64; i++) order[i] = (uint8_t)(2 * i + first);
  return _mm512_load_si512(order);
}

void kt_fp8_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {
      .wide = 1, .half_step = 8 * KT_LINE, .by_columns = 1, .square = square, .part = part};
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  const kt_unpack_tables tables = {.a = every_second(0),
                                   .b = every_second(1),
                                   .c = _mm512_broadcast_i32x4(order),
                                   .d = _mm512_set1_epi8((char)0x80)};
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
