/* Strips of the transpose of BF16 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "bf16.h"

void kt_bf16_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const int64_t strip_size = w->cols * KT_STRIP * 2;
  const uint8_t *codes = w->codes + kt_bf16_tile_start(w->cols, KT_BF16_TILE, 0, column);
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, codes += strip_size, strip += KT_BF16_TILE) {
    kt_prefetch_tile(codes, KT_TILES_AHEAD * strip_size, KT_BF16_TILE);
    kt_transpose_tile(codes, strip);
  }
}

KT_TARGET_END
#endif
