/* Products with the columns of MXFP4 weights by AMX (train/transposed_nibbles_amx.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_nibbles_amx.h"
#include "mxfp4_scales_avx512.h"

/* shift: the dtype of scales. */
KT_INLINE kt_packed_square square(const kt_weight *w, int64_t n, int64_t column) {
  return (kt_packed_square){w->codes + kt_bf16_tile_start(w->cols, KT_FP4_TILE, n, column),
                            kt_group_scale_at(w, n, column), w->layout.scale_dtype};
}

KT_INLINE void part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0)
    _mm512_store_ps(u->scale, kt_mxfp4_scales((int32_t)u->square->shift, u->square->scale,
                                              KT_HALF_ROWS * u->half));
  kt_nibble_part(0, t, u, q);
}

void kt_mxfp4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.wide = 1, .square = square, .part = part};
  static const int order[4] = {0, 2, 1, 3}; /* gemm/fp4_gemm.h */
  const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)kt_fp4_bf16);
  const __m512i numbers = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  const kt_unpack_tables tables = kt_nibble_words(order, _mm512_castsi512_ps(numbers));
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
