/* Blocks of ggml on AVX2. Bit-equal to decode_ggml_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "decode.h"
#define GGML_LANES 8
#include "ggml_bytes_x86.h"

#include "decode_ggml_loop.h"

void kt_decode_ggml_avx2(const kt_matrix *m, int64_t row, int64_t count, float *out,
                         int64_t stride) {
  ggml_rows(m, row, count, out, stride);
}

KT_TARGET_END
#endif
