/* int8_gemm.h - INT8 as weights of the MoE forward. */
#ifndef KT_INT8_GEMM_H
#define KT_INT8_GEMM_H

#include "../moe/gemm.h"
#include "int8.h"

kt_product_fn kt_int8_product_scalar, kt_int8_product_avx512, kt_int8_product_amx;

#endif
