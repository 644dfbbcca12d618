/* fp8.h - E4M3 weights (no infinities, NaN only with all bits set), scales per 128 x 128
 * block or per row.
 *
 * A packed line is 32 rows x 2 columns: byte (row r, column c) at
 *   r%16/4 * 16 + r/16 * 8 + r%4 * 2 + c
 * so that within each 16 bytes the low 8 hold four of rows 0..15 and the high 8 four of rows
 * 16..31: interleaved with their other bytes they are two lines of bf16. */
#ifndef KT_FP8_H
#define KT_FP8_H

#include "../gemm/bf16_gemm.h"
#include "../gemm/e4m3.h"

enum { KT_FP8_TILE = 1024, KT_FP8_BLOCK = 128 };

kt_transpose_fn kt_fp8_transpose_scalar, kt_fp8_transpose_avx512;
kt_stream_fn kt_fp8_stream_amx;
kt_transposed_fn kt_fp8_transposed_amx;
kt_product_fn kt_fp8_product_scalar, kt_fp8_product_avx2, kt_fp8_product_avx512,
    kt_fp8_product_float_avx512, kt_fp8_product_amx;

#endif
