/* INT8 on AVX-512: the strips of strip_avx512.h, one byte per code. */
#include "../cpu.h"

#if KT_X86
#include "../common/strip_avx512.h"
#include "int8.h"

static const kt_tile_rule rule = {&kt_int8_packer, KT_INT8_TILE_COLS, KT_INT8_BLOCK_ROWS, 1};

KT_INLINE void add_tile_error(kt_row_error *sum, const uint8_t *row, int64_t k, int form,
                              __m512i bytes, __m512 inverse_step) {
  const __m512i lowest = _mm512_set1_epi8(-128);
  sum->zeros += _mm_popcnt_u64(_mm512_testn_epi8_mask(bytes, bytes));
  sum->invalid += _mm_popcnt_u64(_mm512_cmpeq_epi8_mask(bytes, lowest));
  kt_add_error64(sum, row, k, form, bytes, inverse_step);
}

kt_status kt_int8_quantize_pack_avx512(const kt_matrix *m, uint8_t *packed, float *scale,
                                       float *scratch) {
  return kt_quantize_pack_strips(m, packed, scale, scratch, rule, kt_round64);
}

void kt_int8_measure_avx512(const kt_matrix *m, const uint8_t *packed, const float *scale,
                            float *scratch, kt_error *error) {
  kt_measure_strips(m, packed, scale, scratch, rule, add_tile_error, error);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
