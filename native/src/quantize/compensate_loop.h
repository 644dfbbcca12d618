/* compensate_loop.h - the loop of kt_compensate, included by one file per level. */
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "compensate.h"

#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* everything with vectors is inlined */
#endif

/* Adding and subtracting this rounds a magnitude below 2^22 to the nearest integer, ties to even.
 */
#define KT_TO_INTEGER 0x1.8p23f

enum { ROWS = KT_COMPENSATE_ROWS, TOGETHER = 4 /* columns whose errors are spread at once */ };

/* Of a column, one lane for each row. */
typedef float floats __attribute__((vector_size(4 * ROWS)));
typedef int32_t masks __attribute__((vector_size(4 * ROWS)));
typedef double doubles __attribute__((vector_size(8 * ROWS)));
typedef int8_t bytes __attribute__((vector_size(ROWS)));

typedef struct kt_compensate_tile {
  floats weights[KT_COMPENSATE_COLS];
  doubles loss;
} kt_compensate_tile;

/* `count` values of the ROWS of a vector, from memory and back: zeros are read behind them. */
#define GET(vector, at, count)                                                                     \
  (count == ROWS ? memcpy(&(vector), at, sizeof(vector))                                           \
                 : memcpy(memset(&(vector), 0, sizeof(vector)), at, (size_t)count * sizeof *(at)))
#define PUT(at, vector, count)                                                                     \
  memcpy(at, &(vector), count == ROWS ? sizeof(vector) : (size_t)count * sizeof *(at))

#define WHERE(which, a, b) ((floats)(((which) & (masks)(a)) | (~(which) & (masks)(b))))

/* Codes of a column of a tile, and their errors over the diagonal of the factor. */
KT_INLINE void column(const kt_compensate_job *job, kt_compensate_tile *tile, int64_t j,
                      int64_t first, int64_t count, floats *error) {
  const int64_t at = j * job->rows + first;
  const floats w = tile->weights[j];
  floats step;
  GET(step, job->step + job->group_of_col[j] * job->rows + first, count);
  const masks positive = step > 0.0f;
  const floats most = WHERE(positive, (floats){0} + job->top, (floats){0});
  floats ratio = w / WHERE(positive, step, (floats){0} + 1.0f);
  ratio = WHERE(ratio > -most, ratio, -most);
  ratio = WHERE(ratio < most, ratio, most);
  const floats code = (ratio + KT_TO_INTEGER) - KT_TO_INTEGER;
  *error = (w - code * step) / job->factor[j * job->cols + j];
  const bytes stored = __builtin_convertvector(__builtin_convertvector(code, masks), bytes);
  PUT(job->codes + at, stored, count);
  PUT(job->errors + at, *error, count);
  const doubles wide = __builtin_convertvector(*error, doubles);
  tile->loss += wide * wide;
}

/* Rows first .. first + count, at most ROWS. */
KT_INLINE void tile_rows(const kt_compensate_job *job, int64_t first, int64_t count) {
  kt_compensate_tile tile;
  for (int64_t j = 0; j < job->cols; j++)
    GET(tile.weights[j], job->weights + j * job->stride + first, count);
  GET(tile.loss, job->loss + first, count);
  for (int64_t j = 0; j < job->cols; j += TOGETHER) {
    const float *const factor = job->factor + j * job->cols;
    const int64_t own = job->cols - j < TOGETHER ? job->cols - j : TOGETHER;
    floats error[TOGETHER];
    for (int64_t i = 0; i < own; i++) {
      column(job, &tile, j + i, first, count, error + i);
      for (int64_t k = i + 1; k < own; k++)
        tile.weights[j + k] -= error[i] * factor[i * job->cols + j + k];
    }
    for (int64_t k = j + TOGETHER; k < job->cols; k++) {
      floats w = tile.weights[k];
      KT_UNROLL(8)
      for (int i = 0; i < TOGETHER; i++) w -= error[i] * factor[i * job->cols + k];
      tile.weights[k] = w;
    }
  }
  PUT(job->loss + first, tile.loss, count);
}

static void compensate_all(const kt_compensate_job *job) {
  int64_t row = 0;
  for (; row + ROWS <= job->rows; row += ROWS) tile_rows(job, row, ROWS);
  if (row < job->rows) tile_rows(job, row, job->rows - row);
}
