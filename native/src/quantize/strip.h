/* strip.h - what the vector packers of INT8 and INT4 share: a strip of 16 source rows at a time,
 * first its row maxima, then half a tile after the other. A level provides the loops inside. */
#ifndef KT_STRIP_H
#define KT_STRIP_H

#include "../format/format.h"
#include "../format/int_tiles.h"
#include "../simd/target.h"
#include "../source/decode.h"
#include "fixed.h"
#include "rounding.h"
#include "search.h"

/* How the weights of a row lie in memory, a compile-time constant in every loop. */
enum { KT_ROW_BF16, KT_ROW_F32 };

typedef struct kt_strip {
  const uint8_t *data;
  int64_t row_size; /* bytes from one row to the next */
  int form;
  int in_place; /* rows of the source, not decoded ones */
} kt_strip;

/* Bits of the largest magnitude of a row, widened to binary32; cols % 64 == 0. */
typedef uint32_t kt_row_max_fn(const uint8_t *row, int64_t cols, int form);

/* Columns from k on of the strip's rows, to the half tile that holds them. With `flush`, denormal
 * values count as zero. */
typedef void kt_half_tile_fn(kt_strip strip, int64_t k, const float *inverse, uint8_t *half_tile,
                             int form, int flush);

/* The magnitudes of a row, widened to binary32; cols % 64 == 0. */
typedef void kt_magnitudes_fn(const uint8_t *row, int64_t cols, int form, float *to);

/* A level's loops that do not depend on the format. */
typedef struct kt_strip_loops {
  kt_decode_rows_fn *decode;
  kt_row_max_fn *row_max;
  kt_magnitudes_fn *magnitudes;
  kt_code_sums_fn *code_sums;
  kt_fixed_row_fn *integers;
} kt_strip_loops;

/* A format's tiles and its loops on a level, as constants of the loops below. */
typedef struct kt_strip_rule {
  int64_t tile_cols, block_rows, codes_per_byte;
  kt_strip_loops loops;
  kt_half_tile_fn *half_tile; /* by KT_RULE_AMAX */
  kt_half_tile_fn *nearest;   /* by a search: one rounding, cut to the levels */
} kt_strip_rule;

/* Rows n..n+15: in place where they are plain bf16 or binary32, else decoded. */
KT_INLINE kt_strip kt_strip_at(const kt_matrix *m, int64_t n, float *scratch,
                               kt_decode_rows_fn *decode) {
  const int plain_f32 = m->dtype == KT_F32 && !m->round_to_bf16;
  const int changed = m->block_scale || m->row_factor || m->col_factor;
  if (m->col_stride == 1 && !changed && (m->dtype == KT_BF16 || plain_f32)) {
    const int64_t size = plain_f32 ? 4 : 2;
    return (kt_strip){(const uint8_t *)m->data + n * m->row_stride * size, m->row_stride * size,
                      plain_f32 ? KT_ROW_F32 : KT_ROW_BF16, 1};
  }
  const int64_t stride = kt_scratch_stride(m->cols);
  decode(m, n, KT_STRIP_ROWS, scratch, stride);
  return (kt_strip){(const uint8_t *)scratch, stride * 4, KT_ROW_F32, 0};
}

/* A strip fills every other KiB of its tiles, which no hardware prefetcher follows: claim the
 * lines four tiles ahead (15 to 20 % on matrices beyond the caches). Past the end of the
 * buffer a prefetch does nothing. */
KT_INLINE void kt_prefetch_half_tile(const uint8_t *half_tile) {
  enum { AHEAD = 4 * 2 * KT_HALF_TILE };
  for (int at = AHEAD; at < AHEAD + KT_HALF_TILE; at += 64)
    __builtin_prefetch((const void *)((uintptr_t)half_tile + (uintptr_t)at), 1, 3);
}

/* The same columns of the next strip, while this one, from the cache, keeps the memory idle. */
KT_INLINE void kt_prefetch_strip(kt_strip strip, int64_t at, int64_t size) {
  const uintptr_t next = (uintptr_t)strip.data + (uintptr_t)(KT_STRIP_ROWS * strip.row_size + at);
  for (int r = 0; r < KT_STRIP_ROWS; r++)
    for (int64_t line = 0; line < size; line += 64)
      __builtin_prefetch((const void *)(next + (uintptr_t)(r * strip.row_size) + (uintptr_t)line),
                         0, 2);
}

KT_INLINE void kt_pack_strip(const kt_matrix *m, int64_t n, kt_strip strip, const float *inverse,
                             uint8_t *packed, kt_strip_rule rule, kt_half_tile_fn *half_tile_of,
                             int form, int flush) {
  for (int64_t k = 0; k < m->cols; k += rule.tile_cols) {
    const int64_t tile = kt_tile_start(m->rows, m->cols, rule.block_rows, n, k);
    uint8_t *const half_tile = packed + tile / rule.codes_per_byte + kt_half_tile(n);
    const int64_t size = form == KT_ROW_BF16 ? 2 : 4;
    kt_prefetch_half_tile(half_tile);
    if (strip.in_place) kt_prefetch_strip(strip, k * size, rule.tile_cols * size);
    half_tile_of(strip, k, inverse, half_tile, form, flush);
  }
}

KT_INLINE void kt_pack_any_strip(const kt_matrix *m, int64_t n, kt_strip strip,
                                 const float *inverse, uint8_t *packed, kt_strip_rule rule,
                                 kt_half_tile_fn *half_tile, int flush) {
  if (strip.form == KT_ROW_BF16 && !flush)
    kt_pack_strip(m, n, strip, inverse, packed, rule, half_tile, KT_ROW_BF16, 0);
  else if (strip.form == KT_ROW_BF16)
    kt_pack_strip(m, n, strip, inverse, packed, rule, half_tile, KT_ROW_BF16, 1);
  else if (!flush)
    kt_pack_strip(m, n, strip, inverse, packed, rule, half_tile, KT_ROW_F32, 0);
  else
    kt_pack_strip(m, n, strip, inverse, packed, rule, half_tile, KT_ROW_F32, 1);
}

/* What is searched of rows, but for their weights; NULL: scales by KT_RULE_AMAX. */
typedef struct kt_strip_search {
  const kt_layout *layout;
  const kt_choice *choice;
  float *room; /* for the magnitudes of a row, or for integers of all rows */
  kt_fixed_sums_fn *fixed_sums;
} kt_strip_search;

/* The scale of a row that keeps none. */
KT_INLINE float kt_search_strip_row(const kt_strip_search *search, const kt_weight_format *format,
                                    const kt_matrix *m, const uint8_t *row, int form, float amax,
                                    kt_strip_rule rule) {
  if (form == KT_ROW_BF16)
    rule.loops.magnitudes(row, m->cols, KT_ROW_BF16, search->room);
  else
    rule.loops.magnitudes(row, m->cols, KT_ROW_F32, search->room);
  const kt_search_row weights = {.magnitude = search->room,
                                 .cols = m->cols,
                                 .exact = form == KT_ROW_BF16,
                                 .importance = search->choice->importance,
                                 .top = (float)format->max_level};
  return kt_search_scale(search->layout, &weights, amax, rule.loops.code_sums);
}

/* The scales of all rows. */
KT_INLINE void kt_search_strip(const kt_strip_search *search, const kt_weight_format *format,
                               const kt_matrix *m, kt_strip strip, const float *amax,
                               kt_strip_rule rule, float *scale) {
  if (!kt_is_fixed(search->layout, search->choice)) {
    for (int r = 0; r < KT_STRIP_ROWS; r++)
      scale[r] = kt_search_strip_row(search, format, m, strip.data + r * strip.row_size, strip.form,
                                     amax[r], rule);
    return;
  }
  const kt_fixed_rows rows = {.data = strip.data,
                              .row_size = strip.row_size,
                              .cols = m->cols,
                              .stride = kt_scratch_stride(m->cols),
                              .form = strip.form,
                              .count = KT_STRIP_ROWS,
                              .room = (int16_t *)(void *)search->room};
  kt_fixed_scales(format, &rows, amax, scale, rule.loops.integers, search->fixed_sums);
}

/* Scales of rows n..n+15. Says through *flush whether denormals must be looked for. */
KT_INLINE kt_status kt_scale_strip(const kt_weight_format *format, const kt_matrix *m, int64_t n,
                                   kt_strip strip, const kt_strip_search *search,
                                   kt_strip_rule rule, float *scale, float *inverse, int *flush) {
  const float units = search ? (float)format->scale_units : 1.0f;
  float amax[KT_STRIP_ROWS];
  *flush = 0;
  for (int r = 0; r < KT_STRIP_ROWS; r++) {
    const uint8_t *row = strip.data + r * strip.row_size;
    const uint32_t max = strip.form == KT_ROW_BF16 ? rule.loops.row_max(row, m->cols, KT_ROW_BF16)
                                                   : rule.loops.row_max(row, m->cols, KT_ROW_F32);
    if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
    *flush |= max < KT_FLUSH_BITS;
    amax[r] = kt_float(max);
    if (!search) scale[r] = format->scale(amax[r]);
  }
  if (search) kt_search_strip(search, format, m, strip, amax, rule, scale);
  for (int r = 0; r < KT_STRIP_ROWS; r++) {
    const float kept = kt_kept_scale(format, m, n + r, amax[r]);
    if (kept > 0) scale[r] = kept;
    inverse[r] = kt_reciprocal(scale[r] * units);
  }
  return KT_OK;
}

/* The whole matrix, one binary32 scale per row: each strip is read from memory once, for its
 * maxima, and quantized from the cache. */
KT_INLINE kt_status kt_quantize_pack_strips(const kt_layout *layout, const kt_matrix *m,
                                            const kt_choice *choice, uint8_t *packed, float *scale,
                                            float *scratch, kt_strip_rule rule) {
  const kt_weight_format *format = kt_format_of(layout);
  const kt_strip_search search = {layout, choice, kt_scratch_row(scratch, m->cols),
                                  kt_fixed_sums_best()};
  const kt_strip_search *const searched = choice->rule == KT_RULE_AMAX ? NULL : &search;
  for (int64_t n = 0; n < m->rows; n += KT_STRIP_ROWS) {
    const kt_strip strip = kt_strip_at(m, n, scratch, rule.loops.decode);
    float inverse[KT_STRIP_ROWS];
    int flush;
    const kt_status status =
        kt_scale_strip(format, m, n, strip, searched, rule, scale + n, inverse, &flush);
    if (status) return status;
    if (searched)
      kt_pack_any_strip(m, n, strip, inverse, packed, rule, rule.nearest, flush);
    else
      kt_pack_any_strip(m, n, strip, inverse, packed, rule, rule.half_tile, flush);
  }
  return KT_OK;
}

/* Defines a format's kt_quantize_pack_fn on a level, from <format>_row and <format>_nearest_row,
 * the level's kt_tile_row_fn of the two rules: kt_<format>_quantize_pack_<level>. prefix: of the
 * names of its tiles' geometry, loops: kt_strip_loops. */
#define KT_STRIP_PACKER(format, prefix, codes_per_byte, level, loops)                              \
  KT_INLINE void format##_half_tile(kt_strip strip, int64_t k, const float *inverse, uint8_t *to,  \
                                    int form, int flush) {                                         \
    kt_half_tile_##level(strip, k, inverse, to, form, flush, format##_row);                        \
  }                                                                                                \
  KT_INLINE void format##_nearest_half_tile(kt_strip strip, int64_t k, const float *inverse,       \
                                            uint8_t *to, int form, int flush) {                    \
    kt_half_tile_##level(strip, k, inverse, to, form, flush, format##_nearest_row);                \
  }                                                                                                \
  kt_status kt_##format##_quantize_pack_##level(const kt_layout *layout, const kt_matrix *m,       \
                                                const kt_choice *choice, uint8_t *packed,          \
                                                void *scale, float *scratch) {                     \
    const kt_strip_rule rule = {prefix##_TILE_COLS, prefix##_BLOCK_ROWS,                           \
                                codes_per_byte,     loops,                                         \
                                format##_half_tile, format##_nearest_half_tile};                   \
    return kt_quantize_pack_strips(layout, m, choice, packed, scale, scratch, rule);               \
  }

#endif
