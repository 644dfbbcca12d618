/* Blocks of ggml as the compiler vectorizes their decoders for AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "decode.h"
#include "decode_ggml_loop.h"

void kt_decode_ggml_avx512(const kt_matrix *m, int64_t row, int64_t count, float *out,
                           int64_t stride) {
  ggml_rows(m, row, count, out, stride);
}

KT_TARGET_END
#endif
