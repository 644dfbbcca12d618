/* blocks.h - matrices as blocks of ggml, as ktconv.h describes kt_encode_blocks.
 *
 * One loop, one file per level. A vector has as many runs of columns side by side as it has lanes,
 * and loops go over the columns of a run: sums are formed in the same order on every level, so that
 * all give the same bits. */
#ifndef KT_BLOCKS_H
#define KT_BLOCKS_H

#include "../source/decode.h"

enum { KT_BLOCKS_ROWS = 8 }; /* rows decoded at once */

typedef struct kt_blocks_job {
  int32_t dtype;
  int32_t unit_cols, unit_bytes;
  const kt_matrix *source;
  const float *importance; /* [cols] or NULL */
  uint8_t *blocks;
  float *scratch;
  kt_decode_rows_fn *decode;
} kt_blocks_job;

/* KT_OK; KT_ERR_NONFINITE, without a position; KT_ERR_SCALE. */
typedef kt_status kt_blocks_fn(const kt_blocks_job *job);
kt_blocks_fn kt_blocks_scalar, kt_blocks_avx2, kt_blocks_avx512;

#endif
