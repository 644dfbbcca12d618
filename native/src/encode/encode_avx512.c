/* Encodings for AVX-512: codes of integers and of E2M1 by hand, the rest as the compiler vectorizes
 * it. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "encode_codes_avx512.h"
#include "encode_search_avx512.h"
/* which the loop takes */
#include "encode_loop.h"

kt_status kt_encode_avx512(const kt_encode_job *job) { return encode_any(job); }

KT_TARGET_END
#endif
