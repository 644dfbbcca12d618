/* Error compensation as the compiler vectorizes it for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "compensate_loop.h"

void kt_compensate_avx512(const kt_compensate_job *job) { compensate_all(job); }

KT_TARGET_END
#endif
