/* The reference of quantizing: matrices [rows, cols], one row at a time. What differs between
 * formats is in their row of the table. */
#include "rows.h"

#include "../format/scales.h"
#include "../source/decode.h"
#include "fixed.h"
#include "rounding.h"
#include "search.h"

/* Rows are decoded some at a time, for sources whose rows lie next to each other. What one row
 * becomes fits behind them in the scratch, which has room for KT_STRIP_ROWS rows and one more. */
enum { ROWS = 8 };

/* One row: its scales, one or one per group, and its codes, as numbers and as they are stored. */
typedef struct quantized_row {
  float *scale;
  int8_t *codes;
  uint8_t *plain;
  float *room; /* for what is searched */
} quantized_row;

static quantized_row row_in(const kt_layout *layout, float *scratch, int64_t cols) {
  float *const room = scratch + ROWS * kt_scratch_stride(cols);
  int8_t *const codes = (int8_t *)(room + kt_scratch_stride(cols));
  const int64_t plain = kt_format_of(layout)->plain_bits == 8 ? 0 : cols; /* 8: both are one */
  return (quantized_row){room, codes, (uint8_t *)codes + plain, kt_scratch_row(scratch, cols)};
}

/* Decodes rows from n on, ROWS at most; how many. */
static int64_t decode_rows(const kt_matrix *m, int64_t n, float *scratch) {
  const int64_t count = m->rows - n < ROWS ? m->rows - n : ROWS;
  kt_decode_rows_scalar(m, n, count, scratch, kt_scratch_stride(m->cols));
  return count;
}

/* Two codes in a byte. */
static void store_nibbles(const int8_t *codes, int64_t cols, int32_t bias, uint8_t *plain) {
  for (int64_t k = 0; k < cols; k += 2)
    plain[k / 2] = (uint8_t)(((codes[k] + bias) & 15) | ((codes[k + 1] + bias) & 15) << 4);
}

/* Scale and codes of `cols` columns by KT_RULE_AMAX; `kept`: a scale of the source, or 0. */
static float quantize_amax(const kt_layout *layout, const float *row, int64_t cols, float amax,
                           float kept, int8_t *codes) {
  const kt_weight_format *format = kt_format_of(layout);
  const float scale = kept > 0 ? kept : kt_scale_round(layout->scale_dtype, format->scale(amax));
  kt_round_row(row, cols, kt_reciprocal(scale), codes);
  if (format->requantize) format->requantize(codes, cols);
  return scale;
}

/* The same by a search; `room`: for magnitudes or integers of the row. */
static float quantize_search(const kt_layout *layout, const kt_choice *choice,
                             const kt_search_row *of, const float *row, float amax, float kept,
                             float *room, int8_t *codes) {
  const kt_weight_format *format = kt_format_of(layout);
  float scale = kept;
  if (!(kept > 0) && kt_is_fixed(layout, choice)) {
    const kt_fixed_rows one = {.data = (const uint8_t *)(const void *)row,
                               .cols = of->cols,
                               .count = 1,
                               .room = (int16_t *)(void *)room};
    kt_fixed_scales(format, &one, &amax, &scale, kt_fixed_row_scalar, kt_fixed_sums_scalar);
  } else if (!(kept > 0)) {
    for (int64_t k = 0; k < of->cols; k++) room[k] = fabsf(row[k]);
    scale = kt_search_scale(layout, of, amax, kt_code_sums_scalar);
  }
  const float units = (float)format->scale_units;
  kt_round_row_within(row, of->cols, kt_reciprocal(scale * units), of->top, codes);
  return scale;
}

static kt_status quantize_row(const kt_layout *layout, const kt_matrix *m, const kt_choice *choice,
                              int64_t n, const float *row, const quantized_row *to) {
  const kt_weight_format *format = kt_format_of(layout);
  const int64_t cols = m->cols, group = layout->group ? layout->group : cols;
  for (int64_t k = 0, g = 0; k < cols; k += group, g++) {
    const uint32_t max = kt_row_max_bits(row + k, group);
    if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
    const float amax = kt_float(max);
    const float kept = layout->group ? 0 : kt_kept_scale(format, m, n, amax);
    if (choice->rule == KT_RULE_AMAX) {
      to->scale[g] = quantize_amax(layout, row + k, group, amax, kept, to->codes + k);
      continue;
    }
    const kt_search_row weights = {.magnitude = to->room,
                                   .cols = group,
                                   .importance = choice->importance ? choice->importance + k : NULL,
                                   .top = (float)format->max_level};
    to->scale[g] =
        quantize_search(layout, choice, &weights, row + k, amax, kept, to->room, to->codes + k);
  }
  if (format->plain_bits == 4) store_nibbles(to->codes, cols, format->code_bias, to->plain);
  if (format->plain_bits == 8 && format->code_bias)
    for (int64_t k = 0; k < cols; k++)
      to->plain[k] = (uint8_t)(to->codes[k] + format->code_bias); /* in place */
  return KT_OK;
}

/* Where the row's results go; n: which one it is. */
typedef void store_fn(const kt_layout *layout, const kt_matrix *m, int64_t n,
                      const quantized_row *row, uint8_t *codes, void *scale);

static void store_plain(const kt_layout *layout, const kt_matrix *m, int64_t n,
                        const quantized_row *row, uint8_t *codes, void *scale) {
  const size_t size = kt_plain_row_size(kt_format_of(layout), m->cols);
  const int64_t groups = layout->group ? m->cols / layout->group : 1;
  memcpy(codes + (size_t)n * size, row->plain, size);
  for (int64_t g = 0; g < groups; g++)
    kt_scale_store(layout->scale_dtype, scale, n * groups + g, row->scale[g]);
}

static void store_packed(const kt_layout *layout, const kt_matrix *m, int64_t n,
                         const quantized_row *row, uint8_t *packed, void *scale) {
  kt_format_of(layout)->pack_row(row->plain, m->rows, m->cols, n, packed);
  if (!layout->group) kt_scale_store(layout->scale_dtype, scale, n, row->scale[0]);
  for (int64_t g = 0; layout->group && g < m->cols / layout->group; g++)
    kt_scale_store(layout->scale_dtype, scale, kt_group_scale_index(m->cols, layout->group, n, g),
                   row->scale[g]);
}

static kt_status each_row(const kt_layout *layout, const kt_matrix *m, const kt_choice *choice,
                          float *scratch, store_fn *store, uint8_t *codes, void *scale) {
  const quantized_row to = row_in(layout, scratch, m->cols);
  for (int64_t n = 0, count; n < m->rows; n += count) {
    count = decode_rows(m, n, scratch);
    for (int64_t r = 0; r < count; r++) {
      const float *row = scratch + r * kt_scratch_stride(m->cols);
      const kt_status status = quantize_row(layout, m, choice, n + r, row, &to);
      if (status) return status;
      store(layout, m, n + r, &to, codes, scale);
    }
  }
  return KT_OK;
}

kt_status kt_quantize_rows(const kt_layout *layout, const kt_matrix *m, const kt_choice *choice,
                           uint8_t *codes, void *scale, float *scratch) {
  return each_row(layout, m, choice, scratch, store_plain, codes, scale);
}

kt_status kt_quantize_pack_rows(const kt_layout *layout, const kt_matrix *m,
                                const kt_choice *choice, uint8_t *packed, void *packed_scale,
                                float *scratch) {
  return each_row(layout, m, choice, scratch, store_packed, packed, packed_scale);
}
