/* The comparison of encoded matrices as the compiler vectorizes it for AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "encoded_loop.h"

void kt_encoded_avx2(const kt_encoded_job *job, kt_encoded_audit *audit) {
  audit_encoded(job, audit);
}

KT_TARGET_END
#endif
