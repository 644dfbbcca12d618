/* The table row of INT4 weights, and their scalar product. */
#include "int4_gemm.h"
#include "../cpu.h"
#include "../gemm/int_gemm.h"

static int steps(const kt_layout *layout, int64_t *rows_step, int64_t *cols_step) {
  return kt_int_gemm_steps(layout, KT_INT4_TILE_COLS, rows_step, cols_step);
}

static size_t codes_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout;
  return kt_packed_size(KT_INT4, rows, cols);
}

static size_t scale_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout, (void)cols;
  return (size_t)rows * sizeof(float);
}

static kt_status pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                      const void *scale, uint8_t *packed, void *packed_scale) {
  (void)layout;
  return kt_int_gemm_pack(KT_INT4, rows, cols, codes, scale, packed, packed_scale);
}

void kt_int4_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                            int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_int_product_rows(kt_int4_unpack_row, KT_INT4_STEP, w, strip, strips, x, stride, tokens, out,
                      panel);
}

const kt_gemm kt_int4_gemm = {
    .rows_kind = KT_ROWS_INT8,
    .steps = steps,
    .codes_size = codes_size,
    .scale_size = scale_size,
    .pack = pack,
    .product[KT_ISA_SCALAR] = kt_int4_product_scalar,
#if KT_X86
    .product[KT_ISA_AVX512_VNNI] = kt_int4_product_avx512,
    .product[KT_ISA_AMX] = kt_int4_product_amx,
#endif
};
