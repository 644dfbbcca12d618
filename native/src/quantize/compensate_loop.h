/* compensate_loop.h - the loop of kt_compensate, included by one file per level. */
#include "../simd/target.h"
#include "compensate.h"

/* Adding and subtracting this rounds a magnitude below 2^22 to the nearest integer, ties to even.
 */
#define KT_TO_INTEGER 0x1.8p23f

typedef struct kt_compensate_tile {
  float weights[KT_COMPENSATE_COLS][KT_COMPENSATE_ROWS];
  float step[KT_COMPENSATE_ROWS], code[KT_COMPENSATE_ROWS], error[KT_COMPENSATE_ROWS];
} kt_compensate_tile;

/* Codes of column j of a tile, and their errors over the diagonal of the factor. */
KT_INLINE void column(const kt_compensate_job *job, kt_compensate_tile *tile, int64_t j) {
  const float top = job->top, diagonal = job->factor[j * job->cols + j];
  for (int lane = 0; lane < KT_COMPENSATE_ROWS; lane++) {
    const float w = tile->weights[j][lane], step = tile->step[lane];
    const float divisor = step > 0.0f ? step : 1.0f, most = step > 0.0f ? top : 0.0f;
    float at = w / divisor;
    at = at > -most ? at : -most;
    at = at < most ? at : most;
    const float code = (at + KT_TO_INTEGER) - KT_TO_INTEGER;
    tile->code[lane] = code;
    tile->error[lane] = (w - code * step) / diagonal;
  }
}

/* The columns behind column j take their share of its errors. */
KT_INLINE void spread(const kt_compensate_job *job, kt_compensate_tile *tile, int64_t j) {
  const float *const factor = job->factor + j * job->cols;
  for (int64_t k = j + 1; k < job->cols; k++)
    for (int lane = 0; lane < KT_COMPENSATE_ROWS; lane++)
      tile->weights[k][lane] -= tile->error[lane] * factor[k];
}

/* Rows first .. first + count, at most KT_COMPENSATE_ROWS. */
KT_INLINE void tile_rows(const kt_compensate_job *job, int64_t first, int count) {
  kt_compensate_tile tile;
  for (int64_t j = 0; j < job->cols; j++)
    for (int lane = 0; lane < KT_COMPENSATE_ROWS; lane++)
      tile.weights[j][lane] = lane < count ? job->weights[(first + lane) * job->stride + j] : 0.0f;
  for (int64_t j = 0; j < job->cols; j++) {
    for (int lane = 0; lane < KT_COMPENSATE_ROWS; lane++)
      tile.step[lane] =
          lane < count ? job->step[(first + lane) * job->groups + job->group_of_col[j]] : 0.0f;
    column(job, &tile, j);
    spread(job, &tile, j);
    for (int lane = 0; lane < count; lane++) {
      const int64_t row = first + lane;
      job->codes[row * job->cols + j] = (int8_t)tile.code[lane];
      job->errors[row * job->cols + j] = tile.error[lane];
      job->loss[row] += (double)tile.error[lane] * tile.error[lane];
    }
  }
}

static void compensate_all(const kt_compensate_job *job) {
  for (int64_t row = 0; row < job->rows; row += KT_COMPENSATE_ROWS) {
    const int64_t left = job->rows - row;
    tile_rows(job, row, left < KT_COMPENSATE_ROWS ? (int)left : KT_COMPENSATE_ROWS);
  }
}
