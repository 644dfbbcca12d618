/* blocks.h - the comparison of blocks of ggml with their source (kt_audit_blocks), without the code
 * of blocks/. See audit.h. */
#ifndef KT_AUDIT_BLOCKS_H
#define KT_AUDIT_BLOCKS_H

#include "audit.h"

typedef struct kt_audited_blocks {
  const kt_matrix *source;
  int32_t dtype;
  const uint8_t *blocks;
} kt_audited_blocks;

typedef void kt_audited_blocks_fn(const kt_audited_blocks *job, kt_encoded_audit *audit);
kt_audited_blocks_fn kt_audited_blocks_scalar, kt_audited_blocks_avx2, kt_audited_blocks_avx512;

#endif
