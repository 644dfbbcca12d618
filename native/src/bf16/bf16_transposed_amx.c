/* Products with the columns of BF16 weights by AMX (train/transposed_amx.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/bf16_strip_avx512.h"
#include "../train/transposed_amx.h"
#include "bf16.h"

KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  return (kt_packed_square){w->codes + kt_bf16_tile_start(w->cols, KT_BF16_TILE, n, column), NULL,
                            0};
}

/* Eight rows of two columns each of lines i and i + 2. */
KT_INLINE __m512i two_lines(const uint8_t *codes, int i) {
  const __m256i *const first = (const __m256i *)(const void *)(codes + i * KT_LINE);
  const __m256i *const second = (const __m256i *)(const void *)(codes + (i + 2) * KT_LINE);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(first)),
                            _mm256_loadu_si256(second), 1);
}

/* Line `line` of the unit, and the one two further on, from pairs of rows of lines 0 to 3 and of
 * 4 to 7. */
KT_INLINE void store_two(const kt_unpack_unit *u, int line, __m512i low, __m512i high) {
  const __m512i first = _mm512_shuffle_i64x2(low, high, 0x88);
  const __m512i second = _mm512_shuffle_i64x2(low, high, 0xdd);
  _mm512_store_si512(u->to + line * KT_LINE, kt_words_in_turn(first));
  _mm512_store_si512(u->to + (line + 2) * KT_LINE, kt_words_in_turn(second));
}

/* Parts 0 and 1: rows 0 to 7; 2 and 3: the others. */
KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  const uint8_t *const codes = u->codes + q / 2 * 32;
  (void)t;
  kt_prefetch_line(u->ahead + 2 * q * KT_LINE);
  kt_prefetch_line(u->ahead + (2 * q + 1) * KT_LINE);
  if (q % 2 == 0) {
    const __m512i a = two_lines(codes, 0), b = two_lines(codes, 1);
    const __m512i c = two_lines(codes, 4), d = two_lines(codes, 5);
    u->kept[0] = _mm512_unpackhi_epi64(a, b);
    u->kept[1] = _mm512_unpackhi_epi64(c, d);
    store_two(u, q / 2 * 4, _mm512_unpacklo_epi64(a, b), _mm512_unpacklo_epi64(c, d));
  } else {
    store_two(u, q / 2 * 4 + 1, u->kept[0], u->kept[1]);
  }
}

void kt_bf16_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.plain = 1,
                                      .half_step = KT_BF16_HALF_TILE,
                                      .column = KT_BF16_HALF_TILE / 2,
                                      .square = square,
                                      .part = part};
  static const kt_unpack_tables none;
  kt_transposed_strip(form, &none, 1.0f, t, out);
}

KT_TARGET_END
#endif
