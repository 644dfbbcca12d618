/* Products of slabs with AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "slab_loop.h"

static void multiply(const kt_slabs_at *slabs, const float *const *rows, int64_t tokens,
                     float *const *out, int64_t step) {
  kt_slabs_loop(slabs, rows, tokens, out, step);
}

const kt_slab_math kt_slab_math_avx2 = {.rows = multiply};

KT_TARGET_END
#endif
