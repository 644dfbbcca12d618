/* encoded.h - the comparison of encoded weights with their source (kt_audit_encoded), without the
 * code of encode/. See audit.h. */
#ifndef KT_AUDIT_ENCODED_H
#define KT_AUDIT_ENCODED_H

#include "audit.h"

typedef struct kt_encoded_job {
  const kt_matrix *source;
  int kind, bits, half;  /* kt_encode_kind; of codes: 4 or 8; scales are binary16, not bf16 */
  int search;            /* scales are searched, codes rounded once */
  int tall;              /* FP8: blocks of 128 rows and columns share a scale */
  int64_t group, groups; /* columns that share a scale, and how many such groups a row has */
  float tensor_scale;    /* NVFP4 */
  const uint8_t *codes;  /* [rows][cols * bits / 8] */
  const void *scales;
} kt_encoded_job;

typedef void kt_encoded_fn(const kt_encoded_job *job, kt_encoded_audit *audit);
kt_encoded_fn kt_encoded_scalar, kt_encoded_avx2, kt_encoded_avx512;

/* KT_ERR_SHAPE for a matrix that kt_audit_encoded does not take. */
kt_status kt_encoded_auditable(const kt_encoding *encoding, const kt_matrix *source);

#endif
