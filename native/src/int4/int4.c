/* The table row of INT4. */
#include "int4.h"

const kt_packer kt_int4_packer = {
    .rows_step = KT_ROWS_STEP,
    .cols_step = KT_INT4_TILE_COLS,
    .codes_per_byte = 2,
    .scale = kt_int4_scale,
    .requantize_to_int4 = kt_int4_requantize,
    .pack_row = kt_int4_pack_row,
    .unpack_row = kt_int4_unpack_row,
    .quantize_pack[KT_ISA_SCALAR] = kt_quantize_pack_rows,
#if KT_X86
    .quantize_pack[KT_ISA_AVX2] = kt_int4_quantize_pack_avx2,
    .quantize_pack[KT_ISA_AVX512] = kt_int4_quantize_pack_avx512,
#elif KT_ARM64
    .quantize_pack[KT_ISA_NEON] = kt_int4_quantize_pack_neon,
#endif
};
