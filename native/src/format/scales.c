#include "scales.h"

#include "../quantize/rounding.h"
#include "../simd/bits.h"
#include "../simd/target.h"

#include <math.h>
#include <string.h>

int32_t kt_scale_bytes(int32_t dtype) {
  static const int32_t bytes[] = {
      [KT_SCALE_NONE] = 0, [KT_SCALE_F32] = 4, [KT_SCALE_BF16] = 2, [KT_SCALE_UE8M0] = 1};
  return bytes[dtype];
}

int64_t kt_scale_count(const kt_layout *layout, int64_t rows, int64_t cols) {
  if (layout->scale_dtype == KT_SCALE_NONE) return 0;
  if (layout->group == 0) return rows;
  const int64_t groups = cols / layout->group;
  return kt_format_of(layout)->scale_rows > 1 ? rows / KT_STRIP * groups : rows * groups;
}

double kt_scale_value(int32_t dtype, const void *scale, int64_t i) {
  if (dtype == KT_SCALE_F32) return ((const float *)scale)[i];
  if (dtype == KT_SCALE_BF16) return kt_float((uint32_t)((const uint16_t *)scale)[i] << 16);
  const uint8_t code = ((const uint8_t *)scale)[i];
  const uint64_t wide = (uint64_t)(code + 1023 - 127) << 52;
  double value;
  memcpy(&value, &wide, sizeof value);
  return code == 255 ? (double)NAN : value;
}

double kt_group_scale(const kt_weight *w, int64_t n, int64_t g) {
  return kt_scale_value(w->layout.scale_dtype, w->scale,
                        kt_group_scale_index(w->cols, w->layout.group, n, g));
}

float kt_scale_to_127(float amax) {
  const uint32_t reciprocal_of_127 = 0x3c010204u; /* fl32(1/127) */
  return kt_flush(kt_flush(amax) * kt_float(reciprocal_of_127));
}

float kt_scale_round(int32_t dtype, float value) {
  if (dtype == KT_SCALE_F32) return value;
  const uint32_t bits = kt_bits(value);
  return kt_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

void kt_scale_store(int32_t dtype, void *scale, int64_t i, float value) {
  if (dtype == KT_SCALE_F32)
    ((float *)scale)[i] = value;
  else
    ((uint16_t *)scale)[i] = (uint16_t)(kt_bits(value) >> 16);
}

/* ---- Orders ---------------------------------------------------------------- */

/* Plain scales are a table [height, width]; one row of it is for `rows_each` rows of weights. */
typedef struct table {
  int64_t width, rows_each;
  size_t size; /* bytes of a scale */
} table;

static table table_of(const kt_layout *layout, int64_t cols) {
  const int64_t group = layout->group;
  return (table){group ? cols / group : 1, group ? kt_format_of(layout)->scale_rows : 1,
                 (size_t)kt_scale_bytes(layout->scale_dtype)};
}

/* Packed index of column g of the table, for row n of the weights. */
static int64_t packed_index(const kt_layout *layout, const table *t, int64_t cols, int64_t n,
                            int64_t g) {
  if (layout->group == 0) return n;
  if (t->rows_each > 1) return n / KT_STRIP * t->width + g;
  return kt_group_scale_index(cols, layout->group, n, g);
}

/* Rows of weights from one packed scale to the next. */
static int64_t row_step(const table *t) { return t->rows_each > 1 ? KT_STRIP : 1; }

/* The two loops of packing, for a size of scales that the compiler knows. */

/* Whether no exponent has all bits set; codes of KT_SCALE_UE8M0 are exponents. */
KT_INLINE int all_finite(const uint8_t *scale, int64_t count, size_t size, uint32_t exponent) {
  int found = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits = 0;
    memcpy(&bits, scale + (size_t)i * size, size);
    found |= (bits & exponent) == exponent;
  }
  return !found;
}

KT_INLINE kt_status place(const kt_layout *layout, int64_t rows, int64_t cols, const uint8_t *plain,
                          uint8_t *packed, size_t size, uint32_t exponent) {
  const table t = table_of(layout, cols);
  const int64_t height = (rows + t.rows_each - 1) / t.rows_each;
  if (!all_finite(plain, height * t.width, size, exponent)) return KT_ERR_NONFINITE;
  const int64_t apart = t.rows_each > 1 ? 1 : KT_STRIP; /* packed scales of neighbouring columns */
  for (int64_t n = 0; n < rows; n += row_step(&t)) {
    const uint8_t *const from = plain + (size_t)(n / t.rows_each * t.width) * size;
    uint8_t *const to = packed + (size_t)packed_index(layout, &t, cols, n, 0) * size;
    for (int64_t g = 0; g < t.width; g++)
      memcpy(to + (size_t)(g * apart) * size, from + (size_t)g * size, size);
  }
  return KT_OK;
}

kt_status kt_scales_pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *plain,
                         void *packed) {
  switch (layout->scale_dtype) {
  case KT_SCALE_F32: return place(layout, rows, cols, plain, packed, 4, 0x7f800000);
  case KT_SCALE_BF16: return place(layout, rows, cols, plain, packed, 2, 0x7f80);
  default: return place(layout, rows, cols, plain, packed, 1, 0xff);
  }
}

void kt_scales_unpack(const kt_layout *layout, int64_t rows, int64_t cols, const void *packed,
                      void *plain) {
  const table t = table_of(layout, cols);
  const uint8_t *const from = packed;
  for (int64_t n = 0; n < rows; n += t.rows_each)
    for (int64_t g = 0; g < t.width; g++)
      memcpy((uint8_t *)plain + (size_t)(n / t.rows_each * t.width + g) * t.size,
             from + (size_t)packed_index(layout, &t, cols, n, g) * t.size, t.size);
}
