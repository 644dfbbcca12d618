/* Strips of the transpose of NVFP4 weights with AVX-512: tiles as bf16, transposed as those of BF16
 * weights are. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "fp4.h"

void kt_nvfp4_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const int64_t strip_size = w->cols / KT_TILE_COLS * KT_NVFP4_TILE;
  const uint8_t *codes = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, 0, column);
  _Alignas(64) uint8_t tile[KT_BF16_TILE];
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, codes += strip_size, strip += KT_BF16_TILE) {
    kt_prefetch_tile(codes, KT_TILES_AHEAD * strip_size, KT_NVFP4_TILE);
    kt_nvfp4_decode_tiles(codes, 1, tile);
    kt_transpose_tile(tile, strip);
  }
}

KT_TARGET_END
#endif
