/* The audit for any CPU, and unpacking by it. */
#include "audit_loop.h"

void kt_audit_scalar(const kt_audit_job *job, kt_audit *audit) { audit_all(job, audit); }

void kt_audit_codes_scalar(const kt_audit_format *format, const uint8_t *packed, int64_t rows,
                           int64_t cols, int8_t *codes) {
  uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  int8_t plane[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  if (!format->row_block) {
    for (int64_t at = 0; at < rows * cols; at++)
      codes[at] = (int8_t)code_at(format, packed, rows, cols, at / cols, at % cols);
    return;
  }
  for (int64_t row = 0; row < rows; row += KT_AUDIT_ROWS)
    for (int64_t col = 0; col < cols; col += format->planes * KT_AUDIT_COLS) {
      bytes_by_row(packed + half_tile_at(format, rows, cols, row, col), KT_AUDIT_COLS, bytes);
      for (int p = 0; p < format->planes; p++) {
        if (format->planes == 2)
          nibbles(bytes, p, 8, KT_AUDIT_COLS, plane);
        else
          memcpy(plane, bytes, sizeof plane);
        for (int r = 0; r < KT_AUDIT_ROWS; r++)
          memcpy(codes + (row + r) * cols + col + p * KT_AUDIT_COLS, plane[r], KT_AUDIT_COLS);
      }
    }
}
