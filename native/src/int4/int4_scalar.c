/* The truth of INT4: matrices [rows, cols], one row at a time. */
#include "../common/rounding.h"
#include "int4.h"

float kt_int4_scale(float amax) { return kt_flush((float)((double)amax / 112.0)); }

/* Second rounding, on the 8-bit code: nearest multiple of 16, ties away from zero. As a
 * floor: (q+8)/16 for q >= 0 and (q+7)/16 below, made positive by 8*16 first. */
static int8_t round_code(int8_t code) { return (int8_t)(((code + 8 + 128 - (code < 0)) >> 4) - 8); }

/* Decodes row n into scratch and quantizes it. */
static kt_status quantize_row(const kt_matrix *m, int64_t n, int8_t *codes, float *scale,
                              float *scratch) {
  kt_decode_rows_scalar(m, n, 1, scratch, m->cols);
  const uint32_t max = kt_row_max_bits(scratch, m->cols);
  if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
  *scale = kt_int4_scale(kt_float(max));
  kt_round_row(scratch, m->cols, kt_reciprocal(*scale), codes);
  for (int64_t k = 0; k < m->cols; k++) codes[k] = round_code(codes[k]);
  return KT_OK;
}

kt_status kt_int4_quantize_scalar(const kt_matrix *m, int8_t *codes, float *scale, float *scratch) {
  for (int64_t n = 0; n < m->rows; n++) {
    const kt_status status = quantize_row(m, n, codes + n * m->cols, scale + n, scratch);
    if (status) return status;
  }
  return KT_OK;
}

/* Where group 0 of row n is in the tile that starts at column k. */
static int64_t row_at(int64_t rows, int64_t cols, int64_t n, int64_t k) {
  return kt_tile_start(rows, cols, KT_INT4_BLOCK_ROWS, n, k) / 2 + kt_half_tile(n) + n % 16 * 4;
}

static void pack_row(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  for (int64_t k = 0; k < cols; k += KT_INT4_TILE_COLS) {
    uint8_t *const to = packed + row_at(rows, cols, n, k);
    uint8_t bytes[64];
    for (int j = 0; j < 64; j++)
      bytes[j] = (uint8_t)((codes[k + j] & 0x0f) | (codes[k + j + 64] & 0x0f) << 4);
    for (int g = 0; g < 16; g++) memcpy(to + g * KT_GROUP_STRIDE, bytes + 4 * g, 4);
  }
}

void kt_int4_pack_scalar(const int8_t *codes, int64_t rows, int64_t cols, uint8_t *packed) {
  for (int64_t n = 0; n < rows; n++) pack_row(codes + n * cols, rows, cols, n, packed);
}

static int8_t sign_extend(uint8_t nibble) { return (int8_t)((nibble ^ 8) - 8); }

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       int8_t *codes) {
  for (int64_t k = 0; k < cols; k += KT_INT4_TILE_COLS) {
    const uint8_t *const from = packed + row_at(rows, cols, n, k);
    uint8_t bytes[64];
    for (int g = 0; g < 16; g++) memcpy(bytes + 4 * g, from + g * KT_GROUP_STRIDE, 4);
    for (int j = 0; j < 64; j++) {
      codes[k + j] = sign_extend(bytes[j] & 0x0f);
      codes[k + j + 64] = sign_extend(bytes[j] >> 4);
    }
  }
}

void kt_int4_unpack_scalar(const uint8_t *packed, int64_t rows, int64_t cols, int8_t *codes) {
  for (int64_t n = 0; n < rows; n++) unpack_row(packed, rows, cols, n, codes + n * cols);
}

kt_status kt_int4_quantize_pack_scalar(const kt_matrix *m, uint8_t *packed, float *scale,
                                       float *scratch) {
  int8_t *const codes = (int8_t *)(scratch + m->cols);
  for (int64_t n = 0; n < m->rows; n++) {
    const kt_status status = quantize_row(m, n, codes, scale + n, scratch);
    if (status) return status;
    pack_row(codes, m->rows, m->cols, n, packed);
  }
  return KT_OK;
}

void kt_int4_measure_rows_scalar(const kt_matrix *m, int64_t row, int64_t count,
                                 const uint8_t *packed, const float *scale, float *scratch,
                                 kt_error *error) {
  int8_t *const codes = (int8_t *)(scratch + m->cols);
  for (int64_t n = row; n < row + count; n++) {
    kt_decode_rows_scalar(m, n, 1, scratch, m->cols);
    unpack_row(packed, m->rows, m->cols, n, codes);
    const float computed = kt_int4_scale(kt_float(kt_row_max_bits(scratch, m->cols)));
    error->invalid += !kt_scale_ok(scale[n], computed);
    kt_add_row_error(scratch, codes, m->cols, (double)scale[n] * KT_INT4_STEP, -KT_INT4_MAX, n,
                     error);
  }
}

void kt_int4_measure_scalar(const kt_matrix *m, const uint8_t *packed, const float *scale,
                            float *scratch, kt_error *error) {
  kt_int4_measure_rows_scalar(m, 0, m->rows, packed, scale, scratch, error);
}
