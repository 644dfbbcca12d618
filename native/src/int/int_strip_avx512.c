/* Strips of the transpose of INT8 and INT4 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "int.h"

/* Bytes of the bf16 numbers of 128 magnitudes. */
typedef struct byte_tables {
  __m512i low0, low64, high0, high64;
} byte_tables;

static byte_tables make_tables(void) {
  _Alignas(64) uint8_t low[128], high[128];
  for (int i = 0; i < 128; i++) {
    const uint16_t bits = kt_bf16_bits((float)i);
    low[i] = (uint8_t)bits;
    high[i] = (uint8_t)(bits >> 8);
  }
  return (byte_tables){_mm512_load_si512(low), _mm512_load_si512(low + 64), _mm512_load_si512(high),
                       _mm512_load_si512(high + 64)};
}

/* The magnitude of -128 is looked up as 0: only its upper byte is not that of -0. */
KT_INLINE void store_bytes(const byte_tables *t, __m512i codes, uint8_t *tile, int q) {
  const __m512i sign = _mm512_set1_epi8((char)0x80), least = _mm512_set1_epi8((char)0xc3);
  const __m512i magnitude = _mm512_abs_epi8(codes);
  const __m512i low = _mm512_permutex2var_epi8(t->low0, magnitude, t->low64);
  const __m512i high = _mm512_permutex2var_epi8(t->high0, magnitude, t->high64);
  const __m512i with_sign = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8); /* a | b & c */
  const __m512i upper = _mm512_mask_mov_epi8(with_sign, _mm512_cmpeq_epi8_mask(codes, sign), least);
  kt_store_lines(tile, q, _mm512_unpacklo_epi8(low, upper), _mm512_unpackhi_epi8(low, upper));
}

/* Where the tile of INT8 or INT4 is that starts at (row n, column k). */
KT_INLINE const uint8_t *tile_at(const int int4, const kt_weight *w, int64_t n, int64_t k) {
  if (!int4) return w->codes + kt_tile_start(w->rows, w->cols, KT_INT8_BLOCK_ROWS, n, k);
  return w->codes + kt_tile_start(w->rows, w->cols, KT_INT4_BLOCK_ROWS, n, k) / 2;
}

/* kt_transpose_fn; bytes or nibbles: the tables of the format, the other is NULL. */
KT_INLINE void transpose(const byte_tables *bytes, const kt_nibble_tables *nibbles,
                         const kt_weight *w, int64_t column, uint8_t *strip) {
  const int int4 = nibbles != NULL;
  const int64_t tile_cols = int4 ? KT_INT4_TILE_COLS : KT_INT8_TILE_COLS;
  const int64_t k = column / tile_cols * tile_cols;
  const int64_t within = column % KT_GROUP_STRIDE / 4 * KT_GROUP_STRIDE;
  const __m128i shift = _mm_cvtsi32_si128(column - k < KT_GROUP_STRIDE ? 0 : 4);
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, strip += KT_BF16_TILE) {
    const uint8_t *const codes = tile_at(int4, w, n, k) + within;
    const int64_t later = n + KT_TILES_AHEAD * KT_STRIP;
    const int64_t ahead = later < w->rows ? tile_at(int4, w, later, k) + within - codes : 0;
    for (int half = 0; half < 2; half++) {
      const uint8_t *const lines = codes + half * KT_HALF_TILE;
      __m512i pair[8];
      kt_prefetch_tile(lines, ahead, KT_HALF_TILE / 2);
      kt_row_pairs(0, lines, pair);
      for (int j = 0; j < 8; j++)
        if (int4)
          kt_store_nibbles(nibbles, _mm512_srl_epi16(pair[j], shift), strip, 8 * half + j);
        else
          store_bytes(bytes, pair[j], strip, 8 * half + j);
    }
  }
}

void kt_int8_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const byte_tables t = make_tables();
  transpose(&t, NULL, w, column, strip);
}

void kt_int4_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const kt_nibble_tables t = kt_nibble_integers(8);
  transpose(NULL, &t, w, column, strip);
}

KT_TARGET_END
#endif
