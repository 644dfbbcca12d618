/* The comparison of encoded matrices for AVX-512, by hand but for bf16. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "encoded_floats_avx512.h"
#include "encoded_integers_avx512.h"
/* which the loop takes */
#include "encoded_loop.h"

void kt_encoded_avx512(const kt_encoded_job *job, kt_encoded_audit *audit) {
  audit_encoded(job, audit);
}

KT_TARGET_END
#endif
