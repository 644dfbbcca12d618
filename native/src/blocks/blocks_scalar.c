/* Blocks of ggml for any CPU: the reference of every level. */
#include "blocks_loop.h"

kt_status kt_blocks_scalar(const kt_blocks_job *job) { return blocks_any(job); }
