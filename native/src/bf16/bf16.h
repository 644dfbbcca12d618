/* bf16.h - weights kept in bf16, in the tiles of gemm/bf16_gemm.h. */
#ifndef KT_BF16_H
#define KT_BF16_H

#include "../gemm/bf16_gemm.h"

KT_BF16_KERNELS(bf16);

/* train/strips.h */
kt_product_fn kt_bf16_adding_product_avx512, kt_bf16_adding_product_float_avx512,
    kt_bf16_adding_product_amx;
kt_adding_stream_fn kt_bf16_adding_stream_amx;

#endif
