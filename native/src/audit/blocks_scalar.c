/* The comparison of blocks of ggml for any CPU. */
#include "blocks_loop.h"

void kt_audited_blocks_scalar(const kt_audited_blocks *job, kt_encoded_audit *audit) {
  audit_any_blocks(job, audit);
}
