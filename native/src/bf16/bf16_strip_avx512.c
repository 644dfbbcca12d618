/* Strips of the transpose of BF16 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "bf16.h"

/* Eight lines with 16 columns of 16 rows. */
KT_INLINE void transpose_quarter(const uint8_t *lines, uint8_t *out) {
  __m512i row[8], pair[8];
  for (int i = 0; i < 8; i++) row[i] = kt_words_in_turn(_mm512_loadu_si512(lines + i * KT_LINE));
  kt_transpose8x64(row, pair);
  for (int j = 0; j < 8; j++) _mm512_store_si512(out + j * KT_LINE, pair[j]);
}

void kt_bf16_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const int64_t strip_size = w->cols * KT_STRIP * 2;
  const uint8_t *codes = w->codes + kt_bf16_tile_start(w->cols, KT_BF16_TILE, 0, column);
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, codes += strip_size, strip += KT_BF16_TILE) {
    kt_prefetch_tile(codes, KT_TILES_AHEAD * strip_size, KT_BF16_TILE);
    for (int i = 0; i < 2; i++)   /* rows */
      for (int j = 0; j < 2; j++) /* columns */
        transpose_quarter(codes + (2 * i + j) * KT_BF16_HALF_TILE / 2,
                          strip + (2 * j + i) * KT_BF16_HALF_TILE / 2);
  }
}

KT_TARGET_END
#endif
