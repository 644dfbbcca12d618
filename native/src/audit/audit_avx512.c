/* The audit as the compiler vectorizes it for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target_avx512.h"

#include "audit_loop.h"

void kt_audit_avx512(const kt_audit_job *job, kt_audit *audit) { audit_all(job, audit); }

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
