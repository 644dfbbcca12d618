/* gint4.h - group INT4: codes -8..7, a scale per 32, 64 or 128 columns of a row (group_gemm.h).
 *
 * A packed line is 32 rows x 4 columns of a tile of 32 columns: byte c of word r has column
 * 4p + c of row r in its low and of row r + 16 in its high nibble, p being the number of the line
 * in its tile. */
#ifndef KT_GINT4_H
#define KT_GINT4_H

#include "../gemm/group_gemm.h"

enum { KT_GINT4_TILE = KT_GROUP_TILE(4), KT_GINT4_BIAS = KT_GROUP_BIAS(4) };

kt_transpose_fn kt_gint4_transpose_scalar, kt_gint4_transpose_avx512;
kt_stream_fn kt_gint4_stream_amx;
kt_transposed_fn kt_gint4_transposed_amx;
kt_product_fn kt_gint4_product_scalar, kt_gint4_product_avx2, kt_gint4_product_avx512,
    kt_gint4_product_amx;

#endif
