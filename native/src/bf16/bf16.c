/* The table row of BF16 weights, their packing and scalar product. */
#include "bf16.h"

#include "../cpu.h"

#include <string.h>

static int steps(const kt_layout *layout, int64_t *rows_step, int64_t *cols_step) {
  *rows_step = KT_STRIP;
  *cols_step = KT_TILE_COLS;
  return layout->group == 0 && layout->scale_dtype == KT_SCALE_NONE;
}

static size_t codes_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout;
  return (size_t)(rows * cols) * sizeof(uint16_t);
}

static size_t scale_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  (void)layout, (void)rows, (void)cols;
  return 0;
}

/* Bytes before columns k and k+1 (k even) of row n. */
static int64_t pair_at(int64_t cols, int64_t n, int64_t k) {
  return kt_half_tile_start(cols, KT_BF16_HALF_TILE, n, k) + k % KT_TILE_COLS / 2 * KT_LINE +
         n % KT_HALF_ROWS * 4;
}

static kt_status pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                      const void *scale, uint8_t *packed, void *packed_scale) {
  (void)layout, (void)scale, (void)packed_scale;
  const uint8_t *from = codes;
  for (int64_t n = 0; n < rows; n++)
    for (int64_t k = 0; k < cols; k += 2, from += 4) memcpy(packed + pair_at(cols, n, k), from, 4);
  return KT_OK;
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  for (int64_t k = 0; k < w->cols; k += 2) {
    uint16_t pair[2];
    memcpy(pair, w->codes + pair_at(w->cols, n, k), sizeof pair);
    out[k] = kt_bf16_value(pair[0]);
    out[k + 1] = kt_bf16_value(pair[1]);
  }
}

void kt_bf16_product_scalar(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                            int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_bf16_product_rows(decode_row, w, strip, strips, x, stride, tokens, out, panel);
}

const kt_gemm kt_bf16_gemm = {
    .rows_kind = KT_ROWS_BF16,
    .steps = steps,
    .codes_size = codes_size,
    .scale_size = scale_size,
    .pack = pack,
    .product[KT_ISA_SCALAR] = kt_bf16_product_scalar,
#if KT_X86
    .product[KT_ISA_AVX512_VBMI] = kt_bf16_product_avx512,
    .product[KT_ISA_AMX] = kt_bf16_product_amx,
#endif
};
