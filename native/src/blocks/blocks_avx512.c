/* Blocks of ggml as the compiler vectorizes them for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#define KT_BLOCKS_LANES 16
#include "blocks_loop.h"

kt_status kt_blocks_avx512(const kt_blocks_job *job) { return blocks_any(job); }

KT_TARGET_END
#endif
