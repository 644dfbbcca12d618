/* Strips of the transpose of group INT4 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "group.h"

void kt_gint4_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const kt_nibble_tables t = kt_nibble_integers(0);
  const int64_t strip_size = w->cols * KT_STRIP / 2;
  const uint8_t *codes = w->codes + kt_bf16_tile_start(w->cols, KT_GINT4_TILE, 0, column);
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, codes += strip_size, strip += KT_BF16_TILE) {
    __m512i pair[8];
    kt_prefetch_tile(codes, KT_TILES_AHEAD * strip_size, KT_GINT4_TILE);
    kt_row_pairs(0, codes, pair);
    for (int j = 0; j < 8; j++) {
      kt_store_nibbles(&t, pair[j], strip, j);
      kt_store_nibbles(&t, _mm512_srli_epi16(pair[j], 4), strip, 8 + j);
    }
  }
}

KT_TARGET_END
#endif
