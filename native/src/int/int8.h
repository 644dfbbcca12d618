/* int8.h - KTransformers INT8: one byte per code, tiles of 32 rows x 64 columns. */
#ifndef KT_INT8_H
#define KT_INT8_H

#include "../format/format.h"
#include "../format/int_tiles.h"

enum { KT_INT8_TILE_COLS = 64, KT_INT8_BLOCK_ROWS = 64 };

kt_quantize_pack_fn kt_int8_quantize_pack_avx2, kt_int8_quantize_pack_avx512,
    kt_int8_quantize_pack_neon;
kt_transpose_fn kt_int8_transpose_scalar, kt_int8_transpose_avx512;
kt_stream_fn kt_int8_stream_amx;
kt_transposed_fn kt_int8_transposed_amx;
kt_product_fn kt_int8_product_avx2, kt_int8_product_avx512, kt_int8_product_zen,
    kt_int8_product_amx;

#endif
