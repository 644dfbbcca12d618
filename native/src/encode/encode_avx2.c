/* Encodings as the compiler vectorizes them for AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "encode_search_avx2.h"
/* which the loop takes */
#include "encode_loop.h"

kt_status kt_encode_avx2(const kt_encode_job *job) { return encode_any(job); }

KT_TARGET_END
#endif
