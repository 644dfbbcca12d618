/* rows_view.h - bf16 rows of slots, wherever they lie. */
#ifndef KT_ROWS_VIEW_H
#define KT_ROWS_VIEW_H

#include "adapter.h"

enum { KT_CHUNK = 2 * KT_MAX_TOKENS }; /* slots that are gathered at a time */

/* Rows of `cols` columns (a multiple of 32). */
typedef struct kt_rows_view {
  const uint8_t *rows;
  int64_t stride, cols;
  const int32_t *index; /* slot i has row index[i]; NULL: row i - before */
  int64_t before;
  const kt_drop *drop;       /* NULL, or what is set to 0 */
  const int32_t *pair;       /* of a slot in the batch, for drop */
  int64_t first_pair;        /* of the batch, in the call */
  int64_t first_column;      /* of the rows, in what is dropped from */
  const kt_adapter *adapter; /* its loops */
} kt_rows_view;

/* Bytes of room for KT_CHUNK rows of up to `cols` columns. */
size_t kt_gather_size(int64_t cols);

/* Rows of slots slot .. slot + count - 1, at most KT_CHUNK, *stride bytes apart: in place where
 * they follow one another and are read as they are, else copied into `gather`. */
const uint8_t *kt_view_rows(const kt_rows_view *view, int64_t slot, int64_t count, uint8_t *gather,
                            int64_t *stride);

/* The products of rows of slots with a matrix of few rows, `outputs`, which is made strip by strip.
 */
typedef struct kt_narrow {
  kt_rows_view in;
  void (*make)(const struct kt_narrow *narrow, int64_t strip, uint8_t *out, uint8_t *spare);
  kt_projection projection; /* for `make` */
  int64_t expert, part, width;
  int64_t outputs;
  float *values; /* of slot i at values + (i - values_before) * value_stride */
  int64_t value_stride, values_before;
} kt_narrow;

/* Memory of one thread. */
typedef struct kt_lora_worker {
  uint8_t *gather, *strips, *spare;
  float *out; /* [KT_MAX_TOKENS][KT_STRIP] */
} kt_lora_worker;

void kt_narrow_products(const kt_narrow *narrow, const kt_lora_worker *worker, uint8_t *panel,
                        int64_t slot, int64_t count);

#endif
