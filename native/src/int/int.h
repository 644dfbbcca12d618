/* int.h - KTransformers' INT8 and INT4: tiles of 32 rows (format/int_tiles.h).
 *
 *   INT8   one code in a byte, 64 columns
 *   INT4   two codes in a byte, 128 columns: byte j of a row of a tile holds column j in its low
 *          and column j+64 in its high nibble
 *
 * From KT_..._LEAST_STREAMED tokens on a product is faster when it fetches the next strip itself;
 * for fewer, the core reads longer runs of lines faster than they are prefetched in parts. */
#ifndef KT_INT_H
#define KT_INT_H

#include "../format/format.h"
#include "../format/int_tiles.h"

enum { KT_INT8_TILE_COLS = 64, KT_INT8_BLOCK_ROWS = 64, KT_INT8_LEAST_STREAMED = 6 };
enum { KT_INT4_TILE_COLS = 128, KT_INT4_BLOCK_ROWS = 128, KT_INT4_LEAST_STREAMED = 2 };

kt_quantize_pack_fn kt_int8_quantize_pack_avx2, kt_int8_quantize_pack_avx512,
    kt_int8_quantize_pack_neon;
kt_transpose_fn kt_int8_transpose_avx512;
kt_stream_fn kt_int8_stream_amx, kt_int8_stream_avx512;
kt_transposed_fn kt_int8_transposed_amx;
kt_product_fn kt_int8_product_avx2, kt_int8_product_avx512, kt_int8_product_zen,
    kt_int8_product_amx;

kt_quantize_pack_fn kt_int4_quantize_pack_avx2, kt_int4_quantize_pack_avx512,
    kt_int4_quantize_pack_neon;
kt_transpose_fn kt_int4_transpose_avx512;
kt_stream_fn kt_int4_stream_amx, kt_int4_stream_avx512;
kt_transposed_fn kt_int4_transposed_amx;
kt_product_fn kt_int4_product_avx2, kt_int4_product_avx512, kt_int4_product_zen,
    kt_int4_product_amx;

#endif
