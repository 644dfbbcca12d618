/* The table of weight formats, what follows from its rows, and packing. */
#include "format.h"

#include "../gemm/bf16_gemm.h"
#include "../source/matrix.h"
#include "scales.h"

static const kt_weight_format *const table[] = {
    [KT_FORMAT_INT8] = &kt_int8_format,   [KT_FORMAT_INT4] = &kt_int4_format,
    [KT_FORMAT_BF16] = &kt_bf16_format,   [KT_FORMAT_FP8] = &kt_fp8_format,
    [KT_FORMAT_MXFP4] = &kt_mxfp4_format, [KT_FORMAT_GINT4] = &kt_gint4_format,
    [KT_FORMAT_GINT8] = &kt_gint8_format, [KT_FORMAT_NVFP4] = &kt_nvfp4_format,
    [KT_FORMAT_MXFP8] = &kt_mxfp8_format,
};

const kt_weight_format *kt_format_of(const kt_layout *layout) {
  const int count = (int)(sizeof table / sizeof *table);
  if (!layout || layout->format < 0 || layout->format >= count) return NULL;
  const kt_weight_format *format = table[layout->format];
  if (layout->scale_dtype < 0 || layout->scale_dtype > KT_SCALE_UE8M0 ||
      !(format->scale_dtypes >> layout->scale_dtype & 1))
    return NULL;
  for (int i = 0; i < format->group_count; i++)
    if (format->groups[i] == layout->group) return format;
  return NULL;
}

static int32_t col_multiple(const kt_layout *layout, const kt_weight_format *format) {
  return layout->group > format->col_multiple ? layout->group : format->col_multiple;
}

kt_status kt_layout_check(const kt_layout *layout, int64_t rows, int64_t cols) {
  const kt_weight_format *format = kt_format_of(layout);
  if (!format || rows <= 0 || cols <= 0) return KT_ERR_ARGUMENT;
  /* 8 bytes per element are more than codes, scales or floats take; and as there are 32 rows at
   * least, more than scratch takes. So no size in bytes overflows below this. */
  if (cols > INT64_MAX / 8 / rows) return KT_ERR_SHAPE;
  return rows % KT_ROW_MULTIPLE || cols % col_multiple(layout, format) ? KT_ERR_SHAPE : KT_OK;
}

kt_status kt_layout_describe(const kt_layout *layout, kt_layout_traits *traits) {
  const kt_weight_format *format = kt_format_of(layout);
  if (!format || !traits) return KT_ERR_ARGUMENT;
  *traits = (kt_layout_traits){.bits = format->bits,
                               .plain_bits = format->plain_bits,
                               .inner_scales = format->inner_scales,
                               .code_bias = format->code_bias,
                               .row_multiple = KT_ROW_MULTIPLE,
                               .col_multiple = col_multiple(layout, format),
                               .scale_size = kt_scale_bytes(layout->scale_dtype),
                               .scale_rows = layout->group ? format->scale_rows : 1,
                               .max_level = format->max_level,
                               .scale_units = format->scale_units};
  return KT_OK;
}

static size_t packed_size(const kt_weight_format *format, int64_t rows, int64_t cols) {
  const int64_t inner = cols / KT_INNER_COLS * format->inner_scales;
  return (size_t)(rows * cols * format->bits / 8 + rows * inner);
}

size_t kt_packed_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  if (kt_layout_check(layout, rows, cols)) return 0;
  return packed_size(kt_format_of(layout), rows, cols);
}

size_t kt_scale_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  if (kt_layout_check(layout, rows, cols)) return 0;
  return (size_t)kt_scale_count(layout, rows, cols) * (size_t)kt_scale_bytes(layout->scale_dtype);
}

/* Checks that pack and unpack share. *scales: whether there are scales to place. */
static kt_status check_places(const kt_layout *layout, int64_t rows, int64_t cols,
                              const void *codes, const void *scale, const void *packed,
                              const void *packed_scale, int *scales) {
  if (!codes || !packed) return KT_ERR_ARGUMENT;
  const kt_status status = kt_layout_check(layout, rows, cols);
  if (status) return status;
  *scales = layout->scale_dtype != KT_SCALE_NONE && scale;
  return layout->scale_dtype != KT_SCALE_NONE && !scale != !packed_scale ? KT_ERR_ARGUMENT : KT_OK;
}

/* Row n of a matrix [rows, cols], or the strip of rows that begins with it. */
static void pack_rows(const kt_weight_format *format, const uint8_t *codes, int64_t rows,
                      int64_t cols, int64_t n, uint8_t *packed) {
  const int64_t tile_size = (int64_t)packed_size(format, KT_STRIP, KT_TILE_COLS);
  const size_t row_size = kt_plain_row_size(format, cols);
  if (!format->pack_tile) {
    format->pack_row(codes, rows, cols, n, packed);
    return;
  }
  for (int64_t k = 0; k < cols; k += KT_TILE_COLS)
    format->pack_tile(codes + kt_plain_row_size(format, k), row_size,
                      packed + kt_bf16_tile_start(cols, tile_size, n, k));
}

kt_status kt_pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                  const void *scale, void *packed, void *packed_scale) {
  int scales;
  const kt_status status =
      check_places(layout, rows, cols, codes, scale, packed, packed_scale, &scales);
  if (status) return status;
  const kt_weight_format *format = kt_format_of(layout);
  const size_t row_size = kt_plain_row_size(format, cols);
  const uint8_t *row = codes;
  const int64_t step = format->pack_tile ? KT_STRIP : 1;
  for (int64_t n = 0; n < rows; n += step, row += (size_t)step * row_size) {
    if (format->is_finite && !format->is_finite(row, step * cols)) return KT_ERR_NONFINITE;
    pack_rows(format, row, rows, cols, n, packed);
  }
  return scales ? kt_scales_pack(layout, rows, cols, scale, packed_scale) : KT_OK;
}

kt_status kt_unpack(const kt_layout *layout, int64_t rows, int64_t cols, const void *packed,
                    const void *packed_scale, void *codes, void *scale) {
  int scales;
  const kt_status status =
      check_places(layout, rows, cols, codes, scale, packed, packed_scale, &scales);
  if (status) return status;
  const kt_weight_format *format = kt_format_of(layout);
  const size_t row_size = kt_plain_row_size(format, cols);
  uint8_t *row = codes;
  for (int64_t n = 0; n < rows; n++, row += row_size)
    format->unpack_row(packed, rows, cols, n, row);
  if (scales) kt_scales_unpack(layout, rows, cols, packed_scale, scale);
  return KT_OK;
}
