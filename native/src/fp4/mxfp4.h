/* mxfp4.h - E2M1 weights with a scale per 32 columns of a row (OCP Microscaling, MXFP4). */
#ifndef KT_MXFP4_H
#define KT_MXFP4_H

#include "../gemm/fp4_gemm.h"

enum { KT_MXFP4_GROUP = 32 };

kt_transpose_fn kt_mxfp4_transpose_scalar, kt_mxfp4_transpose_avx512;
kt_stream_fn kt_mxfp4_stream_amx;
kt_transposed_fn kt_mxfp4_transposed_amx;
kt_product_fn kt_mxfp4_product_scalar, kt_mxfp4_product_avx2, kt_mxfp4_product_avx512,
    kt_mxfp4_product_float_avx512, kt_mxfp4_product_amx;

/* Packed tiles as tiles of bf16 (bf16_gemm.h), 64-byte aligned. exponents: NULL, or per tile and
 * row the UE8M0 scale of the row, EXACT_FIRST to EXACT_LAST: then numbers are multiplied by them,
 * which bf16 holds exactly (0.5 * 2^-125 is the smallest normal number, 6 * 2^125 finite). */
enum { KT_MXFP4_EXACT_FIRST = 2, KT_MXFP4_EXACT_LAST = 252 };
void kt_mxfp4_decode_tiles(const uint8_t *codes, const uint8_t *exponents, int64_t tiles,
                           uint8_t *out);

/* `count` packed scales (a multiple of 16), from scale `first` on, as binary32. */
void kt_mxfp4_decode_scales(const kt_weight *w, int64_t first, int64_t count, float *out);

#endif
