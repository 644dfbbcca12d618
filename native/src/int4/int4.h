/* int4.h - KTransformers INT4: two codes per byte, tiles of 32 rows x 128 columns.
 * Byte j of a row of a tile holds column j in its low and column j+64 in its high nibble. */
#ifndef KT_INT4_H
#define KT_INT4_H

#include "../common/layout.h"
#include "../packed.h"

enum { KT_INT4_TILE_COLS = 128, KT_INT4_BLOCK_ROWS = 128, KT_INT4_MAX = 7, KT_INT4_STEP = 16 };

kt_quantize_fn kt_int4_quantize_scalar;
kt_pack_fn kt_int4_pack_scalar;
kt_unpack_fn kt_int4_unpack_scalar;
kt_quantize_pack_fn kt_int4_quantize_pack_scalar, kt_int4_quantize_pack_avx512;
kt_measure_rows_fn kt_int4_measure_rows_scalar;
kt_measure_fn kt_int4_measure_scalar, kt_int4_measure_avx512;

/* Row scale from the largest magnitude: amax / 112, computed in binary64. The stored scale
 * is the step of an 8-bit code; an INT4 step is 16 of them. */
float kt_int4_scale(float amax);

#endif
