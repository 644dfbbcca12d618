/* Sums over the codes of a row for the search in fixed point: the reference, and the level's. */
#include "../cpu.h"
#include "fixed.h"

enum { BLOCK = 512 }; /* columns: products of 127 and 32767 of so many fit 32 bits */

/* In loops of their own, over 16 bits each, of which compilers make vectors. */
static void add_block(const int16_t *row, int64_t cols, kt_fixed_levels levels, uint16_t inverse,
                      kt_fixed_sums *sums) {
  int16_t code[BLOCK];
  int32_t product = 0, square = 0;
  for (int64_t k = 0; k < cols; k++) {
    const int16_t y = (int16_t)((uint32_t)(uint16_t)row[k] * inverse >> 16);
    const int16_t left = (int16_t)(levels.bound - y), below = left > 0 ? left : 0;
    code[k] = (int16_t)(levels.top - (below >> levels.shift));
  }
  for (int64_t k = 0; k < cols; k++) product += row[k] * code[k];
  for (int64_t k = 0; k < cols; k++) square += code[k] * code[k];
  sums->product += product;
  sums->square += square;
}

void kt_fixed_sums_scalar(const kt_fixed_row *row, int bits, const uint16_t *inverse, int count,
                          kt_fixed_sums *sums) {
  const int64_t cols = row->cols;
  for (int i = 0; i < count; i++) {
    sums[i] = (kt_fixed_sums){0, 0};
    for (int64_t k = 0; k < cols; k += BLOCK)
      add_block(row->m + k, cols - k < BLOCK ? cols - k : BLOCK, kt_fixed_levels_of(bits),
                inverse[i], sums + i);
  }
}

kt_fixed_sums_fn *kt_fixed_sums_best(void) {
  static kt_fixed_sums_fn *const levels[KT_LEVELS] = {
      [KT_ISA_SCALAR] = kt_fixed_sums_scalar,
#if KT_X86
      [KT_ISA_AVX2] = kt_fixed_sums_avx2,
      [KT_ISA_AVX512] = kt_fixed_sums_avx512,
      [KT_ISA_AVX512_VNNI] = kt_fixed_sums_vnni,
#elif KT_ARM64
      [KT_ISA_NEON] = kt_fixed_sums_neon,
#endif
  };
  return KT_CELL(levels);
}
