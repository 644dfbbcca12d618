/* int8.h - KTransformers INT8: one byte per code, tiles of 32 rows x 64 columns. */
#ifndef KT_INT8_H
#define KT_INT8_H

#include "../quantize/layout.h"
#include "../quantize/packed.h"

enum { KT_INT8_TILE_COLS = 64, KT_INT8_BLOCK_ROWS = 64 };

/* Row scale from the largest magnitude: amax * fl32(1/127), a product, not a quotient. */
float kt_int8_scale(float amax);

/* Codes int8 [cols] of row n of a [rows, cols] matrix, to and from their packed bytes. */
void kt_int8_pack_row(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed);
void kt_int8_unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                        int8_t *codes);

kt_quantize_pack_fn kt_int8_quantize_pack_avx2, kt_int8_quantize_pack_avx512,
    kt_int8_quantize_pack_neon;

#endif
