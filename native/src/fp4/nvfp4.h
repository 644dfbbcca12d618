/* nvfp4.h - E2M1 weights with an E4M3 scale per 16 columns of a row, times a float per row.
 *
 * A tile is the lines of its codes (fp4_gemm.h), then the E4M3 scales of rows 0..31 for columns
 * 0..15, then those for columns 16..31. E2M1 times E4M3 has at most 6 significant bits: bf16 has it
 * exactly. */
#ifndef KT_NVFP4_H
#define KT_NVFP4_H

#include "../gemm/fp4_gemm.h"

enum {
  KT_NVFP4_GROUP = 16,
  KT_NVFP4_TILE_GROUPS = KT_TILE_COLS / KT_NVFP4_GROUP,
  KT_NVFP4_TILE = KT_FP4_TILE + KT_NVFP4_TILE_GROUPS * KT_STRIP,
  KT_NVFP4_PLAIN = KT_TILE_COLS / 2 + KT_NVFP4_TILE_GROUPS /* bytes of a row's 32 columns */
};

kt_transpose_fn kt_nvfp4_transpose_scalar, kt_nvfp4_transpose_avx512;
kt_stream_fn kt_nvfp4_stream_amx;
kt_transposed_fn kt_nvfp4_transposed_amx;
kt_product_fn kt_nvfp4_product_scalar, kt_nvfp4_product_avx2, kt_nvfp4_product_avx512,
    kt_nvfp4_product_float_avx512, kt_nvfp4_product_amx;

/* Packed tiles, without the scales of rows, as tiles of bf16 (bf16_gemm.h), 64-byte aligned. */
void kt_nvfp4_decode_tiles(const uint8_t *codes, int64_t tiles, uint8_t *out);

#endif
