/* Quantizing, or encoding, and auditing together, as many rows at a time as a second cache holds.
 */
#include "../audit/encoded.h"
#include "../source/matrix.h"

#include <string.h>

enum { ROWS = 128 }; /* whole row blocks of every format: packed rows follow one another */

/* Rows first .. first + rows of a matrix. */
static kt_matrix rows_of(const kt_matrix *m, kt_stored_unit unit, int64_t first, int64_t rows) {
  kt_matrix piece = *m;
  piece.data = (const uint8_t *)m->data + first / unit.rows * m->row_stride * unit.bytes;
  piece.rows = rows;
  piece.row_origin += first;
  if (m->row_scale) piece.row_scale += first;
  if (m->row_factor) piece.row_factor += first;
  return piece;
}

static void add(kt_audit *total, const kt_audit *part, const double *squared, int64_t rows) {
  for (int64_t n = 0; n < rows; n++) {
    total->squared_error += squared[n];
    total->squared_source += squared[rows + n];
  }
  total->squared_value += part->squared_value;
  if (part->max_steps > total->max_steps) total->max_steps = part->max_steps;
  total->zeros += part->zeros;
  total->invalid += part->invalid;
}

static uint64_t word_at(const uint8_t *at) {
  uint64_t word;
  memcpy(&word, at, sizeof word);
  return word;
}

/* Four sums, which do not wait for each other: 0.01 s for a GB in a second cache. */
uint64_t kt_byte_sum(const void *bytes, size_t size) {
  enum { WORD = sizeof(uint64_t) };
  const uint8_t *at = bytes;
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (; size >= 4 * WORD; at += 4 * WORD, size -= 4 * WORD) {
    a += word_at(at);
    b += word_at(at + WORD);
    c += word_at(at + 2 * WORD);
    d += word_at(at + 3 * WORD);
  }
  for (; size >= WORD; at += WORD, size -= WORD) a += word_at(at);
  uint8_t last[WORD] = {0};
  if (size) memcpy(last, at, size);
  return a + b + c + d + word_at(last);
}

/* Piece by piece: the sum is taken of bytes that a cache has. */
int kt_same_bytes(const void *bytes, const void *others, size_t size, uint64_t *sum) {
  enum { PIECE = 1 << 14 };
  const uint8_t *a = bytes, *b = others;
  *sum = 0;
  for (size_t left = size, count; left; left -= count, a += count, b += count) {
    count = left < PIECE ? left : PIECE;
    if (memcmp(a, b, count)) return 0;
    *sum += kt_byte_sum(a, count);
  }
  return 1;
}

static kt_status prove(const kt_layout *layout, kt_proven *m, void *scratch, size_t scratch_size,
                       kt_position *bad) {
  kt_stored_unit unit;
  if (!m->packed || !m->packed_scale || !m->error || !m->amax || !m->rule) return KT_ERR_ARGUMENT;
  kt_status status = kt_matrix_check(m->matrix);
  if (!status) status = kt_dtype_unit(m->matrix->dtype, &unit);
  if (status) return status;
  const int64_t rows = m->matrix->rows, cols = m->matrix->cols;
  if (!kt_packed_size(layout, rows, cols)) return KT_ERR_SHAPE;
  const int64_t groups = layout->group ? cols / layout->group : 1;
  m->audit = (kt_audit){0};
  m->sums[0] = m->sums[1] = 0;
  for (int64_t first = 0; first < rows; first += ROWS) {
    const int64_t count = rows - first < ROWS ? rows - first : ROWS, at = first * groups;
    const kt_matrix piece = rows_of(m->matrix, unit, first, count);
    uint8_t *const codes = (uint8_t *)m->packed + kt_packed_size(layout, first, cols);
    uint8_t *const scale = (uint8_t *)m->packed_scale + kt_scale_size(layout, first, cols);
    double squares[2 * ROWS];
    kt_audit part;
    status = kt_quantize_pack(layout, &piece, m->choice, codes, scale, scratch, scratch_size, bad);
    if (status == KT_ERR_NONFINITE && bad) bad->row += first;
    if (!status)
      status = kt_audit_run(layout, &piece, m->choice, count, 0, codes, scale, m->error + at,
                            m->amax + at, m->rule + at, squares, &part, scratch, scratch_size);
    if (status) return status;
    add(&m->audit, &part, squares, count);
    m->sums[0] += kt_byte_sum(codes, kt_packed_size(layout, count, cols));
    m->sums[1] += kt_byte_sum(scale, kt_scale_size(layout, count, cols));
    if (!m->squared) continue;
    memcpy(m->squared + first, squares, (size_t)count * sizeof *squares);
    memcpy(m->squared + rows + first, squares + count, (size_t)count * sizeof *squares);
  }
  return KT_OK;
}

kt_status kt_quantize_audit(const kt_layout *layout, kt_proven *matrices, int64_t count,
                            void *scratch, size_t scratch_size, int64_t *failed, kt_position *bad) {
  if (!layout || !matrices || count < 0) return KT_ERR_ARGUMENT;
  for (int64_t i = 0; i < count; i++) {
    const kt_status status = prove(layout, &matrices[i], scratch, scratch_size, bad);
    if (!status) continue;
    if (failed) *failed = i;
    return status;
  }
  return KT_OK;
}

static void add_encoded(kt_encoded_audit *total, const kt_encoded_audit *part) {
  total->squared_source += part->squared_source;
  total->squared_error += part->squared_error;
  total->squared_value += part->squared_value;
  if (part->max_steps > total->max_steps) total->max_steps = part->max_steps;
  total->zeros += part->zeros;
  total->other_codes += part->other_codes;
  total->other_scales += part->other_scales;
}

kt_status kt_encode_audit(const kt_encoding *encoding, const kt_matrix *matrix, float tensor_scale,
                          void *codes, void *scales, void *scratch, size_t scratch_size,
                          kt_encoded_audit *audit, uint64_t *sums, kt_position *bad) {
  kt_stored_unit unit;
  if (!audit || !sums || !codes) return KT_ERR_ARGUMENT;
  kt_status status = kt_matrix_check(matrix);
  if (!status) status = kt_dtype_unit(matrix->dtype, &unit);
  if (status) return status;
  kt_encoded_audit total = {0};
  uint64_t codes_sum = 0;
  size_t scales_size = 0;
  uint8_t *code = codes, *scale = scales;
  for (int64_t first = 0; first < matrix->rows; first += ROWS) {
    const int64_t count = matrix->rows - first < ROWS ? matrix->rows - first : ROWS;
    const kt_matrix piece = rows_of(matrix, unit, first, count);
    kt_encoded sizes;
    kt_encoded_audit part;
    status = kt_encoded_sizes(encoding, count, matrix->cols, &sizes);
    if (!status && !first) status = kt_encoded_auditable(encoding, matrix);
    if (!status)
      status = kt_encode(encoding, &piece, tensor_scale, code, scale, scratch, scratch_size, bad);
    if (status == KT_ERR_NONFINITE && bad) bad->row += first;
    if (!status) status = kt_audit_encoded(encoding, &piece, tensor_scale, code, scale, &part);
    if (status) return status;
    add_encoded(&total, &part);
    const size_t code_size = (size_t)(count * sizes.row_size);
    const size_t scale_size = (size_t)(sizes.scale_rows * sizes.scale_cols * sizes.scale_size);
    codes_sum += kt_byte_sum(code, code_size);
    code += code_size; /* whole words of the sum, but for the last rows */
    if (scale_size) scale += scale_size;
    scales_size += scale_size;
  }
  *audit = total;
  sums[0] = codes_sum;
  sums[1] = scales_size ? kt_byte_sum(scales, scales_size) : 0;
  return KT_OK;
}
