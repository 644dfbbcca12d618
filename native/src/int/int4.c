/* The table row of INT4: its roundings, and the places of the codes of a row. */
#include "int.h"

#include "../cpu.h"
#include "../gemm/bf16_gemm.h"
#include "../gemm/int_gemm.h"
#include "../quantize/rounding.h"
#include "../quantize/rows.h"
#include "../simd/bits.h"

/* Of a row, from its largest magnitude: amax / 112, computed in binary64. The stored scale
 * is the step of an 8-bit code; an INT4 step is 16 of them. */
static float scale_of(float amax) { return kt_flush((float)((double)amax / 112.0)); }

/* On 8-bit codes q: nearest multiple of 16, ties away from zero. As a floor: (q+8)/16 for
 * q >= 0 and (q+7)/16 below, made positive by 8*16 first. */
static void requantize_to_int4(int8_t *codes, int64_t cols) {
  for (int64_t k = 0; k < cols; k++)
    codes[k] = (int8_t)(((codes[k] + 8 + 128 - (codes[k] < 0)) >> 4) - 8);
}

/* Where group 0 of row n is in the tile that starts at column k. */
static int64_t row_at(int64_t rows, int64_t cols, int64_t n, int64_t k) {
  return kt_tile_start(rows, cols, KT_INT4_BLOCK_ROWS, n, k) / 2 + kt_half_tile(n) + n % 16 * 4;
}

static void pack_row(const uint8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed) {
  for (int64_t k = 0; k < cols; k += KT_INT4_TILE_COLS) {
    uint8_t *const to = packed + row_at(rows, cols, n, k);
    uint8_t bytes[64];
    for (int j = 0; j < 64; j++)
      bytes[j] = (uint8_t)((codes[k + j] & 0x0f) | (codes[k + j + 64] & 0x0f) << 4);
    for (int g = 0; g < 16; g++) memcpy(to + g * KT_GROUP_STRIDE, bytes + 4 * g, 4);
  }
}

static uint8_t sign_extend(int nibble) { return (uint8_t)((nibble ^ 8) - 8); }

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  for (int64_t k = 0; k < cols; k += KT_INT4_TILE_COLS) {
    const uint8_t *const from = packed + row_at(rows, cols, n, k);
    uint8_t bytes[64];
    for (int g = 0; g < 16; g++) memcpy(bytes + 4 * g, from + g * KT_GROUP_STRIDE, 4);
    for (int j = 0; j < 64; j++) {
      codes[k + j] = sign_extend(bytes[j] & 0x0f);
      codes[k + j + 64] = sign_extend(bytes[j] >> 4);
    }
  }
}

static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  const int64_t at = row_at(w->rows, w->cols, n, k / KT_INT4_TILE_COLS * KT_INT4_TILE_COLS);
  const int64_t column = k % (KT_INT4_TILE_COLS / 2);
  const uint8_t byte = w->codes[at + column / 4 * KT_GROUP_STRIDE + column % 4];
  const int upper = k % KT_INT4_TILE_COLS >= KT_INT4_TILE_COLS / 2;
  return kt_bf16_bits((int8_t)sign_extend(upper ? byte >> 4 : byte & 0x0f));
}

const kt_weight_format kt_int4_format = {
    .bits = 4,
    .plain_bits = 8,
    .col_multiple = KT_INT4_TILE_COLS,
    .group_count = 1,
    .groups = {0},
    .scale_dtypes = 1u << KT_SCALE_F32,
    .scale_rows = 1,
    .pack_row = pack_row,
    .unpack_row = unpack_row,
    .max_level = 7,
    .scale_units = 16,
    .scale = scale_of,
    .requantize = requantize_to_int4,
    .quantize_pack[KT_ISA_SCALAR] = kt_quantize_pack_rows,
    .block_rows = KT_INT4_BLOCK_ROWS,
    .rows_kind = KT_ROWS_INT8,
    .number = number,
    .product[KT_ISA_SCALAR] = kt_int_product_scalar,
    .transpose[KT_ISA_SCALAR] = kt_transpose_scalar,
#if KT_X86
    .quantize_pack[KT_ISA_AVX2] = kt_int4_quantize_pack_avx2,
    .quantize_pack[KT_ISA_AVX512] = kt_int4_quantize_pack_avx512,
    .transpose[KT_ISA_AVX512_VBMI] = kt_int4_transpose_avx512,
    .product[KT_ISA_AVX512_ZEN] = kt_int4_product_zen,
    .product[KT_ISA_AVX512_VNNI] = kt_int4_product_avx512,
    .product[KT_ISA_AVX2] = kt_int4_product_avx2,
    .product[KT_ISA_AMX] = kt_int4_product_amx,
    .stream[KT_ISA_AVX512_VNNI] = kt_int4_stream_avx512,
    .stream[KT_ISA_AMX] = kt_int4_stream_amx,
    .least_tokens = {2},
    .least_avx512 = KT_INT4_LEAST_STREAMED,
    .transposed = kt_int4_transposed_amx,
    .splits = 1,
#elif KT_ARM64
    .quantize_pack[KT_ISA_NEON] = kt_int4_quantize_pack_neon,
#endif
};
