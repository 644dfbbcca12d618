/* What is computed outside experts with AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "dense_loop.h"

KT_DENSE_LOOPS(avx2)

static void dots(const kt_bf16_rows *w, const kt_bf16_rows *x, float *out, int64_t step) {
  kt_dots_loop(w, x, out, step);
}

const kt_dense_math kt_dense_math_avx2 = {dots, weigh_avx2, exponentials_avx2, scale_avx2,
                                          rotate_avx2};

KT_TARGET_END
#endif
