/* Strips of the transpose of INT4 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "int4.h"

static const uint8_t *tile_at(const kt_weight *w, int64_t n, int64_t k) {
  return w->codes + kt_tile_start(w->rows, w->cols, KT_INT4_BLOCK_ROWS, n, k) / 2;
}

void kt_int4_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const int64_t k = column / KT_INT4_TILE_COLS * KT_INT4_TILE_COLS;
  const int64_t within = column % (KT_INT4_TILE_COLS / 2) / 4 * KT_GROUP_STRIDE;
  const __m128i shift = _mm_cvtsi32_si128(column - k < KT_INT4_TILE_COLS / 2 ? 0 : 4);
  const kt_nibble_tables t = kt_nibble_integers(8);
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, strip += KT_BF16_TILE) {
    const uint8_t *const codes = tile_at(w, n, k) + within;
    const int64_t later = n + KT_TILES_AHEAD * KT_STRIP;
    const int64_t ahead = later < w->rows ? tile_at(w, later, k) + within - codes : 0;
    for (int half = 0; half < 2; half++) {
      const uint8_t *const lines = codes + half * KT_HALF_TILE;
      __m512i pair[8];
      kt_prefetch_tile(lines, ahead, KT_HALF_TILE / 2);
      kt_row_pairs(0, lines, pair);
      for (int j = 0; j < 8; j++)
        kt_store_nibbles(&t, _mm512_srl_epi16(pair[j], shift), strip, 8 * half + j);
    }
  }
}

KT_TARGET_END
#endif
