/* bf16.h - weights kept in bf16, in the tiles of gemm/bf16_gemm.h. */
#ifndef KT_BF16_H
#define KT_BF16_H

#include "../gemm/bf16_gemm.h"

kt_transpose_fn kt_bf16_transpose_scalar, kt_bf16_transpose_avx512;
kt_stream_fn kt_bf16_stream_amx;
kt_transposed_fn kt_bf16_transposed_amx;
kt_product_fn kt_bf16_product_scalar, kt_bf16_product_avx2, kt_bf16_product_avx512,
    kt_bf16_product_float_avx512, kt_bf16_product_amx;

/* train/strips.h */
kt_product_fn kt_bf16_adding_product_scalar, kt_bf16_adding_product_avx512,
    kt_bf16_adding_product_float_avx512, kt_bf16_adding_product_amx;
kt_adding_stream_fn kt_bf16_adding_stream_amx;

#endif
