/* The table row of INT8. */
#include "int8.h"

const kt_packer kt_int8_packer = {
    .rows_step = KT_ROWS_STEP,
    .cols_step = KT_INT8_TILE_COLS,
    .codes_per_byte = 1,
    .scale = kt_int8_scale,
    .pack_row = kt_int8_pack_row,
    .unpack_row = kt_int8_unpack_row,
    .quantize_pack[KT_ISA_SCALAR] = kt_quantize_pack_rows,
#if KT_X86
    .quantize_pack[KT_ISA_AVX2] = kt_int8_quantize_pack_avx2,
    .quantize_pack[KT_ISA_AVX512] = kt_int8_quantize_pack_avx512,
#elif KT_ARM64
    .quantize_pack[KT_ISA_NEON] = kt_int8_quantize_pack_neon,
#endif
};
