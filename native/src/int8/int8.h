/* int8.h - KTransformers INT8: one byte per code, tiles of 32 rows x 64 columns. */
#ifndef KT_INT8_H
#define KT_INT8_H

#include "../common/layout.h"
#include "../packed.h"

enum { KT_INT8_TILE_COLS = 64, KT_INT8_BLOCK_ROWS = 64, KT_INT8_MAX = 127 };

kt_quantize_fn kt_int8_quantize_scalar;
kt_pack_fn kt_int8_pack_scalar;
kt_unpack_fn kt_int8_unpack_scalar;
kt_quantize_pack_fn kt_int8_quantize_pack_scalar, kt_int8_quantize_pack_avx512;
kt_measure_rows_fn kt_int8_measure_rows_scalar;
kt_measure_fn kt_int8_measure_scalar, kt_int8_measure_avx512;

/* Row scale from the largest magnitude: amax * fl32(1/127), a product, not a quotient. */
float kt_int8_scale(float amax);

#endif
