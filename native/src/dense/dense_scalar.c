/* The reference of what is computed outside experts. */
#include "../cpu.h"
#include "dense_loop.h"

KT_DENSE_LOOPS(scalar)

static void dots(const kt_bf16_rows *w, const kt_bf16_rows *x, float *out, int64_t step) {
  kt_dots_loop(w, x, out, step);
}

const kt_dense_math kt_dense_math_scalar = {dots, weigh_scalar, exponentials_scalar, scale_scalar,
                                            rotate_scalar};

static const kt_dense_math *const cells[KT_LEVELS] = {
    [KT_ISA_SCALAR] = &kt_dense_math_scalar,
#if KT_X86
    [KT_ISA_AVX2] = &kt_dense_math_avx2,
    [KT_ISA_AVX512] = &kt_dense_math_avx512,
#endif
};

const kt_dense_math *kt_dense_math_best(void) { return KT_CELL(cells); }

int kt_dense_is_fast(void) { return kt_dense_math_best() != &kt_dense_math_scalar; }
