/* Blocks of ggml as the compiler vectorizes them for AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "blocks_loop.h"

kt_status kt_blocks_avx2(const kt_blocks_job *job) { return blocks_any(job); }

KT_TARGET_END
#endif
