/* decode_floats_loop.h - rows of BF16, F16, F32 and E4M3, as a level decodes them that has defined
 *
 *   LANES          numbers of a vector
 *   decode_span    columns of a row that are adjacent, all times one factor
 *   decode_square  LANES columns of LANES rows that lie next to each other (row_stride 1)
 *
 * KT_F8_E4M3 is decoded to KT_E4M3_UNIT of its values (decode_loops.h), which factors make good. */
#ifndef KT_DECODE_FLOATS_LOOP_H
#define KT_DECODE_FLOATS_LOOP_H

#include "decode.h"
#include "decode_loops.h"

#include <math.h>

KT_INLINE void decode_e4m3_row(const kt_matrix *m, int64_t n, int rounded, float *row) {
  const uint8_t *from = (const uint8_t *)m->data + n * m->row_stride;
  const float *scales = m->block_scale + kt_grid_row(m, n);
  for (kt_grid_span s = kt_grid_first(m); s.begin < m->cols; s = kt_grid_next(m, s)) {
    const float factor = scales[s.col] / KT_E4M3_UNIT; /* exact */
    if (isinf(factor)) {
      kt_decode_cell_scalar(m, n, 1, row, m->cols);
      return;
    }
    decode_span(from, KT_F8_E4M3, s.begin, s.end, factor, 1, rounded, row);
  }
}

KT_INLINE void decode_row(const kt_matrix *m, int64_t n, int dtype, int rounded, float *row) {
  const uint8_t *from = (const uint8_t *)m->data + n * m->row_stride * kt_float_size(dtype);
  if (dtype == KT_F8_E4M3) {
    decode_e4m3_row(m, n, rounded, row);
  } else if (m->block_scale) {
    decode_span(from, dtype, 0, m->cols, 1.0f, 0, 0, row);
    kt_finish_row(m, n, row);
  } else {
    decode_span(from, dtype, 0, m->cols, 1.0f, 0, rounded, row);
  }
}

KT_INLINE void decode_rows(const kt_matrix *m, int64_t row, int64_t count, int dtype, int rounded,
                           float *out, int64_t stride) {
  if (m->col_stride == 1 && !m->zero_point) {
    for (int64_t r = 0; r < count; r++) decode_row(m, row + r, dtype, rounded, out + r * stride);
  } else if (m->col_stride != 1 && count % LANES == 0 && m->cols % LANES == 0) {
    const int scaled = m->block_scale != NULL;   /* then they are rounded after that */
    for (int64_t k = 0; k < m->cols; k += LANES) /* each line of memory once for all rows */
      for (int64_t r = 0; r < count; r += LANES)
        decode_square(m, row + r, k, dtype, rounded && !scaled, out + r * stride, stride);
    for (int64_t r = 0; scaled && r < count; r++) kt_finish_row(m, row + r, out + r * stride);
  } else {
    /* numbers with zero points are no known format */
    kt_decode_cell_scalar(m, row, count, out, stride);
  }
}

/* One instantiation per dtype, so that the inner loops hold no switch. */
#define DECODE_DTYPE(name, dtype, level)                                                           \
  void kt_decode_##name##_##level(const kt_matrix *m, int64_t row, int64_t count, float *out,      \
                                  int64_t stride) {                                                \
    if (m->round_to_bf16)                                                                          \
      decode_rows(m, row, count, dtype, 1, out, stride);                                           \
    else                                                                                           \
      decode_rows(m, row, count, dtype, 0, out, stride);                                           \
  }

#define DECODE_FLOATS(level)                                                                       \
  DECODE_DTYPE(bf16, KT_BF16, level)                                                               \
  DECODE_DTYPE(f16, KT_F16, level)                                                                 \
  DECODE_DTYPE(f32, KT_F32, level)                                                                 \
  DECODE_DTYPE(e4m3, KT_F8_E4M3, level)

#endif
