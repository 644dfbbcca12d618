/* FP8 and MXFP8 products with AMX.
 *
 * A strip of MXFP8 whose scales bf16 can take in is decoded with them and summed as one group. The
 * outermost powers of two keep groups of 32 columns, whose sums are scaled and added as with
 * AVX-512. Which of the two depends on the weights alone. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_blocks.h"
#include "../gemm/powers_avx512.h"
#include "fp8_tables_avx512.h"

/* Lines 4 part .. 4 part + 3 of tiles side by side; in the place of scales are tables. */
KT_INLINE void unpack(kt_amx_codes codes, uint8_t *tiles, const int part) {
  const kt_line_tables tables = *(const kt_line_tables *)(const void *)codes.scale;
  KT_UNROLL(4)
  for (int line = 4 * part; line < 4 * part + 4; line++) {
    uint8_t *const to = tiles + line / 16 * KT_BF16_TILE + line % 16 * KT_LINE;
    __m512i line0, line1;
    kt_fp8_lines(&tables, _mm512_loadu_si512(codes.at + line * KT_LINE), &line0, &line1);
    _mm512_store_si512(to, line0);
    _mm512_store_si512(to + KT_BF16_HALF_TILE, line1);
  }
}

/* A block of 128 x 128 has one scale. */
KT_INLINE void scales_of(const kt_amx_groups *s, int64_t g, __m512 scale[2]) {
  const float *const scales = s->w->scale;
  scale[0] = scale[1] = _mm512_set1_ps(scales[s->strip * s->number + g]);
}

KT_INLINE kt_amx_strip strip_of(const kt_weight *w, int64_t strip) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  return kt_amx_whole_strip(w->codes + strip * tiles * KT_FP8_TILE, NULL, tiles);
}

static void stream_scaled(const kt_line_tables *tables, const kt_weight *w, int64_t strip,
                          const uint8_t *x, int64_t stride, int64_t tokens, kt_beside *beside,
                          float *out) {
  const kt_amx_group_form form = {.steps = KT_FP8_BLOCK / KT_TILE_COLS,
                                  .line = KT_AMX_LINE,
                                  .half = KT_BF16_HALF_TILE,
                                  .size = KT_FP8_TILE,
                                  .unpack = unpack,
                                  .scales = scales_of};
  const int64_t steps = w->cols / KT_TILE_COLS, size = steps * KT_FP8_TILE;
  const kt_amx_groups s = {.w = w,
                           .first = {w->codes + strip * size, (const uint8_t *)tables},
                           .x = x,
                           .strip = strip,
                           .number = w->cols / KT_FP8_BLOCK,
                           .stride = stride,
                           .out = out};
  const kt_amx_codes following = {kt_amx_following(&s, size, beside), (const uint8_t *)tables};
  if (tokens > 2 * KT_AMX_ROWS)
    kt_amx_stream_blocks(form, &s, steps, following, KT_AMX_BLOCK, tokens, beside);
  else
    kt_amx_stream_groups(form, &s, size, tokens, beside);
}

_Static_assert(KT_FP8_BLOCK / KT_TILE_COLS == KT_AMX_BLOCK, "a scale for each block of steps");

/* Scales of rows are multiplied after the sum. */
void kt_fp8_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                       int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {.steps = 1, .size = KT_FP8_TILE, .unpack = unpack};
  const kt_line_tables tables = kt_fp8_tables();
  *sums = kt_sums_of(out, tokens);
  if (w->layout.group) {
    stream_scaled(&tables, w, strip, x, stride, tokens, beside, out);
    return;
  }
  kt_amx_stream_unpacked(form, strip_of, w, strip, x, stride, tokens, &tables, beside, out);
  sums->row_scale = (const float *)w->scale + strip * KT_STRIP;
}

/* ---- MXFP8 ------------------------------------------------------------------- */

/* The same, with tables from memory, times the scales of the 32 rows. */
KT_INLINE void unpack_powers(kt_amx_codes codes, uint8_t *tiles, const int part) {
  const kt_line_tables tables = kt_fp8_tables();
  const __m512i exponents0 = kt_power_exponents(codes.scale);
  const __m512i exponents1 = kt_power_exponents(codes.scale + KT_HALF_ROWS);
  KT_UNROLL(4)
  for (int line = 4 * part; line < 4 * part + 4; line++) {
    uint8_t *const to = tiles + line * KT_LINE;
    __m512i line0, line1;
    kt_fp8_lines(&tables, _mm512_loadu_si512(codes.at + line * KT_LINE), &line0, &line1);
    _mm512_store_si512(to, kt_times_powers(line0, exponents0));
    _mm512_store_si512(to + KT_BF16_HALF_TILE, kt_times_powers(line1, exponents1));
  }
}

KT_INLINE void powers_of(const kt_amx_groups *s, int64_t g, __m512 scale[2]) {
  const uint8_t *const from = (const uint8_t *)s->w->scale + (s->strip * s->number + g) * KT_STRIP;
  scale[0] = kt_power_scales(from);
  scale[1] = kt_power_scales(from + KT_HALF_ROWS);
}

KT_INLINE kt_amx_strip strip_with_powers(const kt_weight *w, int64_t strip) {
  const int64_t tiles = w->cols / KT_TILE_COLS;
  return kt_amx_whole_strip(w->codes + strip * tiles * KT_FP8_TILE,
                            (const uint8_t *)w->scale + strip * tiles * KT_STRIP, tiles);
}

static void stream_groups(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                          int64_t tokens, kt_beside *beside, float *out) {
  const kt_line_tables tables = kt_fp8_tables();
  const kt_amx_group_form form = {.steps = 1,
                                  .line = KT_AMX_LINE,
                                  .half = KT_BF16_HALF_TILE,
                                  .size = KT_FP8_TILE,
                                  .unpack = unpack,
                                  .scales = powers_of};
  const int64_t tiles = w->cols / KT_TILE_COLS, size = tiles * KT_FP8_TILE;
  const kt_amx_groups s = {.w = w,
                           .first = {w->codes + strip * size, (const uint8_t *)&tables},
                           .x = x,
                           .strip = strip,
                           .number = tiles,
                           .stride = stride,
                           .out = out};
  kt_amx_stream_groups(form, &s, size, tokens, beside);
}

/* What one way has unpacked of the next strip is of no use to the other. */
void kt_mxfp8_stream_amx(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                         int64_t tokens, kt_beside *beside, void *out, kt_sums *sums) {
  const kt_amx_form form = {
      .steps = 1, .size = KT_FP8_TILE, .scale_size = KT_STRIP, .unpack = unpack_powers};
  const int64_t count = w->cols / KT_TILE_COLS * KT_STRIP;
  *sums = kt_sums_of(out, tokens);
  if (kt_powers_within((const uint8_t *)w->scale + strip * count, count, KT_MXFP8_EXACT_FIRST,
                       KT_MXFP8_EXACT_LAST)) {
    kt_amx_stream_unpacked(form, strip_with_powers, w, strip, x, stride, tokens, NULL, beside, out);
    return;
  }
  beside->ready = NULL;
  stream_groups(w, strip, x, stride, tokens, beside, out);
  beside->ready = NULL;
}

/* ---- Products ---------------------------------------------------------------- */

KT_AMX_DEFINE_PRODUCT(fp8, kt_fp8_product_float_avx512)
KT_AMX_DEFINE_PRODUCT(mxfp8, kt_mxfp8_product_float_avx512)

KT_TARGET_END
#endif
