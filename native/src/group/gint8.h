/* gint8.h - group INT8: codes -128..127, a scale per 32, 64 or 128 columns of a row (group_gemm.h).
 *
 * A tile is 8 pairs of lines, each 4 columns: byte c of word r of the first line has column 4p + c
 * of row r, of the second of row r + 16, p being the number of the pair in its tile. */
#ifndef KT_GINT8_H
#define KT_GINT8_H

#include "../gemm/group_gemm.h"

enum { KT_GINT8_TILE = KT_GROUP_TILE(8), KT_GINT8_BIAS = KT_GROUP_BIAS(8) };

kt_transpose_fn kt_gint8_transpose_scalar;
kt_stream_fn kt_gint8_stream_amx;
kt_transposed_fn kt_gint8_transposed_amx;
kt_product_fn kt_gint8_product_scalar, kt_gint8_product_avx2, kt_gint8_product_avx512,
    kt_gint8_product_amx;

#endif
