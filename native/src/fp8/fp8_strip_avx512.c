/* Strips of the transpose of FP8 and MXFP8 weights with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "fp8_tables_avx512.h"
#include "mxfp8_pairs_avx512.h"

/* Two rows of two columns, in turn. */
KT_INLINE __m512i in_turn(__m512i rows) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  return _mm512_shuffle_epi8(rows, order);
}

/* In lane l of a packed line, word k has rows 4l + 2k' and the next (k' = k % 2), 16 rows further
 * down for k of 2 and 3. Lines are put in an order that unpacking undoes. scale: NULL, or those of
 * MXFP8 of the 32 rows. */
KT_INLINE void transpose_tile(const kt_line_tables *tables, const uint8_t *codes,
                              const uint8_t *scale, uint8_t *tile) {
  static const int order[] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  _Alignas(64) uint32_t scales[KT_STRIP / 2];
  const int exact = scale ? kt_mxfp8_take_scales(scale, scales) : 0;
  __m512i row[16], pair[16];
  for (int i = 0; i < 16; i++) row[i] = in_turn(_mm512_loadu_si512(codes + order[i] * KT_LINE));
  kt_transpose16(row, pair);
  for (int i = 0; i < 16; i++) {
    __m512i line0, line1;
    kt_fp8_lines(tables, pair[i], &line0, &line1);
    const int q = i % 4 / 2 * 8 + i / 4 * 2 + i % 2;
    if (scale) line0 = kt_mxfp8_scaled_line(exact, scale, scales, q, line0);
    if (scale) line1 = kt_mxfp8_scaled_line(exact, scale, scales, q, line1);
    kt_store_lines(tile, q, line0, line1);
  }
}

/* Of MXFP8, 32 rows from row n on. */
KT_INLINE const uint8_t *scales_of(const kt_weight *w, int64_t n, int64_t column) {
  return (const uint8_t *)w->scale +
         kt_group_scale_index(w->cols, KT_MXFP8_GROUP, n, column / KT_MXFP8_GROUP);
}

KT_INLINE void transpose(const int scaled, const kt_weight *w, int64_t column, uint8_t *strip) {
  const kt_line_tables tables = kt_fp8_tables();
  const int64_t strip_size = w->cols * KT_STRIP;
  const uint8_t *codes = w->codes + kt_bf16_tile_start(w->cols, KT_FP8_TILE, 0, column);
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, codes += strip_size, strip += KT_BF16_TILE) {
    kt_prefetch_tile(codes, KT_TILES_AHEAD * strip_size, KT_FP8_TILE);
    transpose_tile(&tables, codes, scaled ? scales_of(w, n, column) : NULL, strip);
  }
}

void kt_fp8_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  transpose(0, w, column, strip);
}

void kt_mxfp8_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  transpose(1, w, column, strip);
}

KT_TARGET_END
#endif
