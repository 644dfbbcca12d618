/* int4_gemm.h - INT4 as weights of the MoE forward. */
#ifndef KT_INT4_GEMM_H
#define KT_INT4_GEMM_H

#include "../moe/gemm.h"
#include "int4.h"

kt_product_fn kt_int4_product_scalar, kt_int4_product_avx512, kt_int4_product_amx;

#endif
