/* Error compensation as the compiler vectorizes it for AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "compensate_loop.h"

void kt_compensate_avx2(const kt_compensate_job *job) { compensate_all(job); }

KT_TARGET_END
#endif
