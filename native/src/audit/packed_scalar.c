/* The audit for any CPU, and unpacking by it. */
/* See packed_search.h. */
#if defined(__ARM_FEATURE_FMA)
enum { AT_ONCE = 1, HAS_FMA = 1 };
#else
enum { AT_ONCE = 1, HAS_FMA = 0 };
#endif
#include "packed_loop.h"

void kt_audit_scalar(const kt_audit_job *job, kt_audit *audit) { audit_all(job, audit); }

void kt_audit_codes_scalar(const kt_audit_format *format, const uint8_t *packed, int64_t rows,
                           int64_t cols, int8_t *codes) {
  if (!format->row_block) {
    for (int64_t at = 0; at < rows * cols; at++)
      codes[at] = (int8_t)code_at(format, packed, rows, cols, at / cols, at % cols);
    return;
  }
  for (int64_t row = 0; row < rows; row += KT_AUDIT_ROWS)
    for (int64_t col = 0; col < cols; col += kt_audit_tile_cols(format))
      half_tile_codes(format, packed + half_tile_at(format, rows, cols, row, col),
                      codes + row * cols + col, cols);
}
