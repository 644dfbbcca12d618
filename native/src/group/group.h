/* group.h - group INT4 and INT8: codes -8..7 or -128..127, a scale per 32, 64 or 128 columns of a
 * row (gemm/group_gemm.h). A tile has 32 rows x 32 columns.
 *
 *   GINT4   8 lines, each 32 rows x 4 columns: byte c of word r has column 4p + c of row r in its
 *           low and of row r + 16 in its high nibble, p being the number of the line in its tile
 *   GINT8   8 pairs of lines, each 4 columns: byte c of word r of the first line has column 4p + c
 *           of row r, of the second of row r + 16, p being the number of the pair in its tile */
#ifndef KT_GROUP_H
#define KT_GROUP_H

#include "../gemm/group_gemm.h"

enum { KT_GINT4_TILE = KT_GROUP_TILE(4), KT_GINT4_BIAS = KT_GROUP_BIAS(4) };
enum { KT_GINT8_TILE = KT_GROUP_TILE(8), KT_GINT8_BIAS = KT_GROUP_BIAS(8) };

kt_transpose_fn kt_gint4_transpose_avx512;
kt_stream_fn kt_gint4_stream_amx;
extern const kt_rounded kt_gint4_rounded_amx;
kt_transposed_fn kt_gint4_transposed_amx;
kt_product_fn kt_gint4_product_avx2, kt_gint4_product_avx512, kt_gint4_product_amx;

kt_stream_fn kt_gint8_stream_amx;
extern const kt_rounded kt_gint8_rounded_amx;
kt_transposed_fn kt_gint8_transposed_amx;
kt_product_fn kt_gint8_product_avx2, kt_gint8_product_avx512, kt_gint8_product_amx;

#endif
