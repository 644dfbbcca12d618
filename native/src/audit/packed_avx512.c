/* The audit for AVX-512: its sums by hand, the rest as the compiler vectorizes it. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
enum { AT_ONCE = 4, HAS_FMA = 1 }; /* see packed_search.h */
#include "packed_fixed_avx512.h"
#include "packed_runs_avx512.h"
/* which the loop takes */
#include "packed_loop.h"

void kt_audit_avx512(const kt_audit_job *job, kt_audit *audit) { audit_all(job, audit); }

KT_TARGET_END
#endif
