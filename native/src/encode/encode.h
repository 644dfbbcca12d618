/* encode.h - codes and scales of checkpoints, as ktconv.h describes kt_encode.
 *
 * One loop, one file per level: the compiler makes of it what the level allows. Elements do not
 * depend on one another, and sums of the search have one order, so that all levels give the same
 * bits. */
#ifndef KT_ENCODE_H
#define KT_ENCODE_H

#include "../source/decode.h"

/* One matrix. What a row needs lies behind KT_ENCODE_ROWS decoded rows in the scratch. */
typedef struct kt_encode_job {
  const kt_encoding *encoding;
  const kt_matrix *source;
  int64_t group, groups; /* columns that share a scale, and how many such groups there are */
  int64_t row_size;      /* bytes of a row of codes */
  float tensor_scale;    /* NVFP4 */
  uint8_t *codes;
  void *scales;
  float *scratch;
  float *largest; /* not NULL: only the largest magnitude is wanted, without an encoding */
  kt_decode_rows_fn *decode;
} kt_encode_job;

enum {
  KT_ENCODE_ROWS = 8,   /* rows decoded at once */
  KT_ENCODE_BLOCK = 128 /* rows that share a scale, of FP8 with groups */
};

/* KT_OK, or KT_ERR_NONFINITE without a position. */
typedef kt_status kt_encode_fn(const kt_encode_job *job);
kt_encode_fn kt_encode_scalar, kt_encode_avx2, kt_encode_avx512;

#endif
