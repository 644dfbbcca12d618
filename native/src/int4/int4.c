/* The table row of INT4. */
#include "int4.h"

#include "../cpu.h"

const kt_packer kt_int4_packer = {
    .rows_step = KT_ROWS_STEP,
    .cols_step = KT_INT4_TILE_COLS,
    .codes_per_byte = 2,
    .quantize = kt_int4_quantize_scalar,
    .pack = kt_int4_pack_scalar,
    .unpack = kt_int4_unpack_scalar,
    .quantize_pack[KT_ISA_SCALAR] = kt_int4_quantize_pack_scalar,
    .measure[KT_ISA_SCALAR] = kt_int4_measure_scalar,
#if KT_X86
    .quantize_pack[KT_ISA_AVX512] = kt_int4_quantize_pack_avx512,
    .measure[KT_ISA_AVX512] = kt_int4_measure_avx512,
#endif
};
