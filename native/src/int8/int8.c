/* The table row of INT8. */
#include "int8.h"

#include "../cpu.h"

const kt_packer kt_int8_packer = {
    .rows_step = KT_ROWS_STEP,
    .cols_step = KT_INT8_TILE_COLS,
    .codes_per_byte = 1,
    .quantize = kt_int8_quantize_scalar,
    .pack = kt_int8_pack_scalar,
    .unpack = kt_int8_unpack_scalar,
    .quantize_pack[KT_ISA_SCALAR] = kt_int8_quantize_pack_scalar,
    .measure[KT_ISA_SCALAR] = kt_int8_measure_scalar,
#if KT_X86
    .quantize_pack[KT_ISA_AVX512] = kt_int8_quantize_pack_avx512,
    .measure[KT_ISA_AVX512] = kt_int8_measure_avx512,
#endif
};
