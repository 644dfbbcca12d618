/* The table row of INT8: the places of the codes of a row. */
#include "int.h"

#include "../cpu.h"
#include "../gemm/bf16_gemm.h"
#include "../gemm/int_gemm.h"
#include "../quantize/rows.h"
#include "../simd/bits.h"

/* Where group 0 of row n is in the tile that starts at column k. */
static int64_t row_at(int64_t rows, int64_t cols, int64_t n, int64_t k) {
  return kt_tile_start(rows, cols, KT_INT8_BLOCK_ROWS, n, k) + kt_half_tile(n) + n % 16 * 4;
}

static void pack_row(const uint8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  for (int64_t k = 0; k < cols; k += KT_INT8_TILE_COLS) {
    uint8_t *const to = packed + row_at(rows, cols, n, k);
    for (int g = 0; g < 16; g++) memcpy(to + g * KT_GROUP_STRIDE, codes + k + 4 * g, 4);
  }
}

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  for (int64_t k = 0; k < cols; k += KT_INT8_TILE_COLS) {
    const uint8_t *const from = packed + row_at(rows, cols, n, k);
    for (int g = 0; g < 16; g++) memcpy(codes + k + 4 * g, from + g * KT_GROUP_STRIDE, 4);
  }
}

static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t at = row_at(w->rows, w->cols, n, k / KT_INT8_TILE_COLS * KT_INT8_TILE_COLS);
  const int64_t column = k % KT_INT8_TILE_COLS;
  return kt_bf16_bits((int8_t)w->codes[at + column / 4 * KT_GROUP_STRIDE + column % 4]);
}

const kt_weight_format kt_int8_format = {
    .bits = 8,
    .plain_bits = 8,
    .col_multiple = KT_INT8_TILE_COLS,
    .group_count = 1,
    .groups = {0},
    .scale_dtypes = 1u << KT_SCALE_F32,
    .scale_rows = 1,
    .pack_row = pack_row,
    .unpack_row = unpack_row,
    .max_level = 127,
    .scale_units = 1,
    .scale = kt_scale_to_127,
    .quantize_pack[KT_ISA_SCALAR] = kt_quantize_pack_rows,
    .block_rows = KT_INT8_BLOCK_ROWS,
    .rows_kind = KT_ROWS_INT8,
    .number = number,
    .product[KT_ISA_SCALAR] = kt_int_product_scalar,
    .transpose[KT_ISA_SCALAR] = kt_transpose_scalar,
#if KT_X86
    .quantize_pack[KT_ISA_AVX2] = kt_int8_quantize_pack_avx2,
    .quantize_pack[KT_ISA_AVX512] = kt_int8_quantize_pack_avx512,
    .transpose[KT_ISA_AVX512_VBMI] = kt_int8_transpose_avx512,
    .product[KT_ISA_AVX512_ZEN] = kt_int8_product_zen,
    .product[KT_ISA_AVX512_VNNI] = kt_int8_product_avx512,
    .product[KT_ISA_AVX2] = kt_int8_product_avx2,
    .product[KT_ISA_AMX] = kt_int8_product_amx,
    .stream[KT_ISA_AVX512_VNNI] = kt_int8_stream_avx512,
    .stream[KT_ISA_AMX] = kt_int8_stream_amx,
    .least_tokens = {KT_INT8_LEAST_STREAMED},
    .least_avx512 = KT_INT8_LEAST_STREAMED,
    .transposed = kt_int8_transposed_amx,
    .splits = 1,
#elif KT_ARM64
    .quantize_pack[KT_ISA_NEON] = kt_int8_quantize_pack_neon,
#endif
};
