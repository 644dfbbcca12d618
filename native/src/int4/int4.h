/* int4.h - KTransformers INT4: two codes per byte, tiles of 32 rows x 128 columns.
 * Byte j of a row of a tile holds column j in its low and column j+64 in its high nibble. */
#ifndef KT_INT4_H
#define KT_INT4_H

#include "../quantize/layout.h"
#include "../quantize/packed.h"

enum { KT_INT4_TILE_COLS = 128, KT_INT4_BLOCK_ROWS = 128, KT_INT4_STEP = 16 };

/* Row scale from the largest magnitude: amax / 112, computed in binary64. The stored scale
 * is the step of an 8-bit code; an INT4 step is 16 of them. */
float kt_int4_scale(float amax);

/* From 8-bit codes to codes -7..7, in place. */
void kt_int4_requantize(int8_t *codes, int64_t cols);

/* Codes int8 [cols] of row n of a [rows, cols] matrix, to and from their packed bytes. */
void kt_int4_pack_row(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed);
void kt_int4_unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                        int8_t *codes);

kt_quantize_pack_fn kt_int4_quantize_pack_avx2, kt_int4_quantize_pack_avx512,
    kt_int4_quantize_pack_neon;

#endif
