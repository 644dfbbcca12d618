/* mxfp4.h - E2M1 weights with a scale per 32 columns of a row (OCP Microscaling, MXFP4).
 *
 * A packed line is 16 rows x 8 columns. In the 32-bit word of a row, nibble j of the low
 * half is column 2j and nibble j of the high half column 2j+1: shifted right by 4j, both are
 * the low nibbles of 16-bit words, which one VPERMW turns into a line of bf16 pairs. */
#ifndef KT_MXFP4_H
#define KT_MXFP4_H

#include "../common/bf16_gemm.h"

enum { KT_MXFP4_HALF_TILE = KT_BF16_HALF_TILE / 4, KT_MXFP4_GROUP = 32 };

/* bf16 bits of the 16 codes: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. */
extern const uint16_t kt_mxfp4_bf16[16];

kt_product_fn kt_mxfp4_product_scalar, kt_mxfp4_product_avx512;

#endif
