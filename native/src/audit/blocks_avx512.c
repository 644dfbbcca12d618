/* The comparison of blocks of ggml as the compiler vectorizes it for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "blocks_loop.h"

void kt_audited_blocks_avx512(const kt_audited_blocks *job, kt_encoded_audit *audit) {
  audit_any_blocks(job, audit);
}

KT_TARGET_END
#endif
