/* Products with the columns of NVFP4 weights by AMX (train/transposed_nibbles_amx.h): scales of 16
 * columns, exact; those of rows are in the activations. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_nibbles_amx.h"
#include "nvfp4_scales_avx512.h"

KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, column);
  return (kt_packed_square){tile, tile + KT_FP4_TILE, 0};
}

KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0) {
    const uint8_t *const scale = (const uint8_t *)u->square->scale + KT_HALF_ROWS * u->half;
    _mm512_store_ps(u->scale, kt_nvfp4_scales(scale));
    _mm512_store_ps(u->scale + 16, kt_nvfp4_scales(scale + KT_STRIP));
    kt_prefetch_line(u->ahead + KT_FP4_TILE);
  }
  kt_nibble_part(1, t, u, q);
}

void kt_nvfp4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.wide = 1, .square = square, .part = part};
  static const int order[4] = {0, 2, 1, 3}; /* gemm/fp4_gemm.h */
  const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)kt_fp4_bf16);
  const __m512i numbers = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  const kt_unpack_tables tables = kt_nibble_words(order, _mm512_castsi512_ps(numbers));
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
