/* Strips of the transpose of INT8 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "int8.h"

/* Bytes of the bf16 numbers of 128 magnitudes. */
typedef struct tables {
  __m512i low0, low64, high0, high64;
} tables;

static tables make_tables(void) {
  _Alignas(64) uint8_t low[128], high[128];
  for (int i = 0; i < 128; i++) {
    const uint16_t bits = kt_bf16_bits((float)i);
    low[i] = (uint8_t)bits;
    high[i] = (uint8_t)(bits >> 8);
  }
  return (tables){_mm512_load_si512(low), _mm512_load_si512(low + 64), _mm512_load_si512(high),
                  _mm512_load_si512(high + 64)};
}

/* The magnitude of -128 is looked up as 0: only its upper byte is not that of -0. */
KT_INLINE void store_codes(const tables *t, __m512i codes, uint8_t *tile, int q) {
  const __m512i sign = _mm512_set1_epi8((char)0x80), least = _mm512_set1_epi8((char)0xc3);
  const __m512i magnitude = _mm512_abs_epi8(codes);
  const __m512i low = _mm512_permutex2var_epi8(t->low0, magnitude, t->low64);
  const __m512i high = _mm512_permutex2var_epi8(t->high0, magnitude, t->high64);
  const __m512i with_sign = _mm512_ternarylogic_epi32(high, codes, sign, 0xf8); /* a | b & c */
  const __m512i upper = _mm512_mask_mov_epi8(with_sign, _mm512_cmpeq_epi8_mask(codes, sign), least);
  kt_store_lines(tile, q, _mm512_unpacklo_epi8(low, upper), _mm512_unpackhi_epi8(low, upper));
}

static const uint8_t *tile_at(const kt_weight *w, int64_t n, int64_t k) {
  return w->codes + kt_tile_start(w->rows, w->cols, KT_INT8_BLOCK_ROWS, n, k);
}

void kt_int8_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const int64_t k = column / KT_INT8_TILE_COLS * KT_INT8_TILE_COLS;
  const int64_t within = column % KT_INT8_TILE_COLS / 4 * KT_GROUP_STRIDE;
  const tables t = make_tables();
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, strip += KT_BF16_TILE) {
    const uint8_t *const codes = tile_at(w, n, k) + within;
    const int64_t later = n + KT_TILES_AHEAD * KT_STRIP;
    const int64_t ahead = later < w->rows ? tile_at(w, later, k) + within - codes : 0;
    for (int half = 0; half < 2; half++) {
      const uint8_t *const lines = codes + half * KT_HALF_TILE;
      __m512i pair[8];
      kt_prefetch_tile(lines, ahead, KT_HALF_TILE / 2);
      kt_row_pairs(0, lines, pair);
      for (int j = 0; j < 8; j++) store_codes(&t, pair[j], strip, 8 * half + j);
    }
  }
}

KT_TARGET_END
#endif
