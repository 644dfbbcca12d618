/* bf16_gemm.h - what products with bf16 activations share.
 *
 * A strip of 32 rows is cut into tiles of 32 columns. The formats differ in how they store a
 * tile; decoded, all are the same: 32 lines of 64 bytes, line q of a half holding columns 2q and
 * 2q+1 of its 16 rows, row after row (a half is the B operand of AMX, a line that of VDPBF16PS
 * with a broadcast pair of activations).
 *
 *   tile: 32 rows x 32 columns = half of rows 0..15, half of rows 16..31
 *   strip: the tiles of 32 rows, in order of columns       matrix: its strips in order */
#ifndef KT_BF16_GEMM_H
#define KT_BF16_GEMM_H

#include "../format/scales.h"

enum {
  KT_TILE_COLS = 32,
  KT_HALF_ROWS = 16,
  KT_LINE = 64,
  KT_BF16_HALF_TILE = 1024,
  KT_BF16_TILE = 2048
};

/* Where a strip of bf16 has (row i, column k), in bytes. */
static inline int64_t kt_strip_at(int64_t i, int64_t k) {
  return k / KT_TILE_COLS * KT_BF16_TILE + i / KT_HALF_ROWS * KT_BF16_HALF_TILE +
         k % KT_TILE_COLS / 2 * KT_LINE + i % KT_HALF_ROWS * 4 + k % 2 * 2;
}

/* The scalar cell of every format, number by number. */
kt_transpose_fn kt_transpose_scalar;

/* The scalar cell of formats with bf16 rows: binary64 products and sums, rounded once. The second
 * adds to out. */
kt_product_fn kt_bf16_product_scalar, kt_bf16_adding_product_scalar;

/* The kernels of a format with bf16 rows, and their cells in its row of the table. */
#define KT_BF16_KERNELS(format)                                                                    \
  kt_product_fn kt_##format##_product_avx2, kt_##format##_product_float_avx512,                    \
      kt_##format##_product_avx512, kt_##format##_product_amx;                                     \
  kt_stream_fn kt_##format##_stream_amx;                                                           \
  kt_transpose_fn kt_##format##_transpose_avx512;                                                  \
  kt_transposed_fn kt_##format##_transposed_amx

#define KT_BF16_SCALAR_CELLS                                                                       \
  .rows_kind = KT_ROWS_BF16, .product[KT_ISA_SCALAR] = kt_bf16_product_scalar,                     \
  .transpose[KT_ISA_SCALAR] = kt_transpose_scalar

#if KT_X86
#define KT_BF16_CELLS(format)                                                                      \
  KT_BF16_SCALAR_CELLS, .product[KT_ISA_AVX2] = kt_##format##_product_avx2,                        \
                        .product[KT_ISA_AVX512] = kt_##format##_product_float_avx512,              \
                        .product[KT_ISA_AVX512_ZEN] = kt_##format##_product_avx512,                \
                        .product[KT_ISA_AMX] = kt_##format##_product_amx,                          \
                        .stream[KT_ISA_AMX] = kt_##format##_stream_amx,                            \
                        .transpose[KT_ISA_AVX512_VBMI] = kt_##format##_transpose_avx512,           \
                        .transposed = kt_##format##_transposed_amx
#else
#define KT_BF16_CELLS(format) KT_BF16_SCALAR_CELLS
#endif

static inline double kt_bf16_value(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof value);
  return value;
}

/* Bytes of codes before the tile of (row n, column k). */
static inline int64_t kt_bf16_tile_start(int64_t cols, int64_t tile_size, int64_t n, int64_t k) {
  return (n / KT_STRIP * (cols / KT_TILE_COLS) + k / KT_TILE_COLS) * tile_size;
}

/* The same, and before the half of row n. */
static inline int64_t kt_half_tile_start(int64_t cols, int64_t half_tile, int64_t n, int64_t k) {
  return kt_bf16_tile_start(cols, 2 * half_tile, n, k) + n % KT_STRIP / KT_HALF_ROWS * half_tile;
}

#endif
