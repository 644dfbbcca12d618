/* The audit for AVX2: its sums by hand, the rest as the compiler vectorizes it. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
enum { AT_ONCE = 2, HAS_FMA = 1 }; /* see packed_search.h */
#include "packed_fixed_avx2.h"
#include "packed_runs_avx2.h"
/* which the loop takes */
#include "packed_loop.h"

void kt_audit_avx2(const kt_audit_job *job, kt_audit *audit) { audit_all(job, audit); }

KT_TARGET_END
#endif
