/* Products with the columns of MXFP4 and NVFP4 weights by AMX (train/transposed_nibbles_amx.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../train/transposed_nibbles_amx.h"
#include "fp4_scales_avx512.h"

KT_INLINE kt_unpack_tables fp4_words(void) {
  static const int order[4] = {0, 2, 1, 3}; /* fp4.h */
  const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)kt_fp4_bf16);
  const __m512i numbers = _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
  return kt_nibble_words(order, _mm512_castsi512_ps(numbers));
}

/* shift: the dtype of scales. */
KT_INLINE kt_packed_square mxfp4_square(const kt_weight *w, int64_t n, int64_t column) {
  return (kt_packed_square){w->codes + kt_bf16_tile_start(w->cols, KT_FP4_TILE, n, column),
                            kt_group_scale_at(w, n, column), w->layout.scale_dtype};
}

KT_INLINE void mxfp4_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0)
    _mm512_store_ps(u->scale, kt_mxfp4_scales((int32_t)u->square->shift, u->square->scale,
                                              KT_HALF_ROWS * u->half));
  kt_nibble_part(0, t, u, q);
}

void kt_mxfp4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.wide = 1, .square = mxfp4_square, .part = mxfp4_part};
  const kt_unpack_tables tables = fp4_words();
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_INLINE kt_packed_square nvfp4_square(const kt_weight *w, int64_t n, int64_t column) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, column);
  return (kt_packed_square){tile, tile + KT_FP4_TILE, 0};
}

/* Scales of 16 columns, exact; those of rows are in the activations. */
KT_INLINE void nvfp4_part(const kt_unpack_tables *t, kt_unpack_unit *u, int q) {
  if (q == 0) {
    const uint8_t *const scale = (const uint8_t *)u->square->scale + KT_HALF_ROWS * u->half;
    _mm512_store_ps(u->scale, kt_nvfp4_scales(scale));
    _mm512_store_ps(u->scale + 16, kt_nvfp4_scales(scale + KT_STRIP));
    kt_prefetch_line(u->ahead + KT_FP4_TILE);
  }
  kt_nibble_part(1, t, u, q);
}

void kt_nvfp4_transposed_amx(kt_transposed *t, float *out) {
  static const kt_unpack_form form = {.wide = 1, .square = nvfp4_square, .part = nvfp4_part};
  const kt_unpack_tables tables = fp4_words();
  kt_transposed_strip(form, &tables, 1.0f, t, out);
}

KT_TARGET_END
#endif
