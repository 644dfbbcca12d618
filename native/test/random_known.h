/* random_known.h - calls that once went wrong, whatever the numbers of the day. */
#ifndef KT_TEST_RANDOM_KNOWN_H
#define KT_TEST_RANDOM_KNOWN_H

#include "random_refusals.h"

/* Where the decoder of a level leaves a matrix to the scalar one, factors counted twice. */
static inline void factors_count_once(int dtype) {
  static const int64_t shapes[][2] = {{8, 64}, {24, 48}, {17, 33}, {16, 64}};
  kt_stored_unit unit;
  kt_dtype_unit(dtype, &unit);
  for (int i = 0; i < 8; i++) {
    const int64_t rows = unit.rows * shapes[i / 2][0];
    const int64_t cols = is_ggml(dtype) ? 64 : unit.cols * shapes[i / 2][1];
    const int kept_pieces = piece_count;
    source s = draw_source(dtype, rows, cols, 0);
    const int64_t high = rows / unit.rows;
    const int64_t wide = (s.m.first_col + cols + unit.cols - 1) / unit.cols;
    const size_t size = (size_t)(high * wide * unit.bytes);
    void *const data = room(size, 1);
    fill_data(&s, data, size);
    s.m.data = data, s.m.row_stride = i % 2 ? 1 : wide, s.m.col_stride = i % 2 ? high : 1;
    s.m.row_factor = some_factors(rows, 0), s.m.col_factor = some_factors(cols, 0);
    truth t;
    describe(&s, "factors");
    decode_at_levels(&s, &t);
    free(t.values);
    release_rooms(kept_pieces);
  }
}

/* Sizes whose products exceed 63 bits. */
static inline void sizes_overflow(void) {
  static const kt_encoding bf16_codes = {KT_ENCODE_BF16, 0, 0, 0};
  static const kt_router router = {.experts = 8,
                                   .top_k = 2,
                                   .groups = 1,
                                   .keep = 1,
                                   .group_score = 1,
                                   .jitter = -1.0f,
                                   .p_norm = 1.0f,
                                   .factor = 1.0f};
  float *const f = room(64, 4);
  int32_t *const groups = memset(room(16, 4), 0, 16);
  int64_t *const ids = memset(room(64, 8), 0, 64);
  kt_encoded *const sizes = room(sizeof *sizes, 8);
  for (int i = 0; i < 16; i++) f[i] = 1.0f;
  if (kt_scratch_size(INT64_MAX) || kt_scratch_size(INT64_MAX / 128 + 1)) FAILED("scratch");
  EXPECTED(KT_ERR_SHAPE, CALLED(kt_encoded_sizes, &bf16_codes, 1, ((int64_t)1 << 60) - 128, sizes));
  EXPECTED(KT_ERR_ARGUMENT,
           CALLED(kt_choose_experts, &router, NULL, INT64_MAX / 2 + 1, f, ids, ids, f));
  EXPECTED(KT_ERR_ARGUMENT, CALLED(kt_choose_experts, &router, NULL, INT64_MAX, f, NULL, ids, f));
  EXPECTED(KT_ERR_SHAPE, CALLED(kt_compensate, 7, (int64_t)1 << 61, 4, f, (int64_t)1 << 61, f, f, 1,
                                groups, room(8, 1), f, room(16, 8)));
  kt_matrix m = {.data = f,
                 .rows = 2,
                 .cols = 2,
                 .row_stride = INT64_MAX / 2,
                 .col_stride = 1,
                 .dtype = KT_F32};
  EXPECTED(KT_ERR_SHAPE, CALLED(kt_decode, &m, f));
  m.row_stride = m.col_stride = 1, m.cols = INT64_MAX / 2;
  EXPECTED(KT_ERR_SHAPE, CALLED(kt_decode, &m, f));
  EXPECTED(KT_ERR_SHAPE, CALLED(kt_largest, &m, f, f, 64, NULL));
  m.cols = 2, m.block_scale = f, m.block_rows = 1, m.block_cols = INT64_MAX, m.scale_stride = 1;
  EXPECTED(KT_ERR_SCALE, CALLED(kt_decode, &m, f));
  m.block_cols = 1, m.row_origin = INT64_MAX;
  EXPECTED(KT_ERR_SCALE, CALLED(kt_decode, &m, f));
}

/* Rounding of terms was held to be wrong where their sum, the gradient of a routing weight, is
 * near zero: dy is at right angles to y. */
static inline void weights_cancel(void) {
  int number = 0;
  while (layouts[number].format != KT_FORMAT_GINT8) number++;
  whole = 1;
  training t = draw_training(number, 0);
  const int64_t tokens = t.call.call.tokens, hidden = t.layer.moe.hidden;
  float *const dy = room((size_t)(tokens * hidden) * sizeof *dy, sizeof *dy);
  trained r;
  t.call.call.y_dtype = KT_F32, t.call.y_size = (size_t)(tokens * hidden) * sizeof *dy;
  use_level(0);
  train(&t, pools[0], &r);
  for (int64_t n = 0; n < tokens; n++) {
    double product = 0, square = 0;
    for (int64_t i = n * hidden; i < (n + 1) * hidden; i++) {
      const double y = (double)((const float *)r.y)[i];
      product += (double)value_at(t.dy_dtype, t.dy, i) * y, square += y * y;
    }
    for (int64_t i = n * hidden; i < (n + 1) * hidden; i++)
      dy[i] = (float)((double)value_at(t.dy_dtype, t.dy, i) -
                      product / square * (double)((const float *)r.y)[i]);
  }
  t.dy = seal(dy), t.dy_dtype = KT_F32, t.wanted = 1 << 1;
  train_at_levels(&t, number);
  whole = 0;
}

static void known_case(int number) {
  if (number < KT_DTYPE_COUNT) {
    factors_count_once(number);
    return;
  }
  if (number == KT_DTYPE_COUNT) {
    weights_cancel();
    return;
  }
  use_level((int)below(level_count));
  sizes_overflow();
}

#endif
