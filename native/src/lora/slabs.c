/* Matrices of adapters in slabs, and the reference of their products. */
#include "slabs.h"

#include "../cpu.h"
#include "slab_loop.h"

static int64_t packed_size(int64_t rows, int64_t cols) {
  return kt_slabs(rows) * kt_slab_lines(cols) * KT_SLAB_LINE;
}

size_t kt_lora_packed_size(int64_t rows, int64_t cols) {
  const int possible = rows > 0 && cols > 0 && rows <= INT32_MAX && cols <= INT32_MAX;
  return possible ? (size_t)packed_size(rows, cols) : 0;
}

/* Zeros outside of the matrix. */
static uint16_t number(int32_t dtype, const void *matrix, int64_t rows, int64_t cols, int64_t row,
                       int64_t col) {
  if (row >= rows || col >= cols) return 0;
  const int64_t i = row * cols + col;
  return dtype == KT_BF16 ? ((const uint16_t *)matrix)[i]
                          : kt_bf16_bits(((const float *)matrix)[i]);
}

kt_status kt_lora_pack(int32_t dtype, const void *matrix, int64_t rows, int64_t cols,
                       void *packed) {
  if ((dtype != KT_BF16 && dtype != KT_F32) || !matrix || !packed ||
      !kt_lora_packed_size(rows, cols))
    return KT_ERR_ARGUMENT;
  if ((uintptr_t)matrix % (dtype == KT_BF16 ? sizeof(uint16_t) : sizeof(float)))
    return KT_ERR_ARGUMENT;
  uint8_t *to = packed;
  for (int64_t first = 0; first < rows; first += KT_SLAB_ROWS)
    for (int64_t k = 0; k < cols; k += 2)
      for (int64_t r = first; r < first + KT_SLAB_ROWS; r++, to += 4) {
        const uint16_t pair[2] = {number(dtype, matrix, rows, cols, r, k),
                                  number(dtype, matrix, rows, cols, r, k + 1)};
        memcpy(to, pair, sizeof pair);
      }
  return KT_OK;
}

static void multiply(const kt_slabs_at *slabs, const float *const *rows, int64_t tokens,
                     float *const *out, int64_t step) {
  kt_slabs_loop(slabs, rows, tokens, out, step);
}

const kt_slab_math kt_slab_math_scalar = {.rows = multiply};

const kt_slab_math *kt_slab_math_best(void) {
  static const kt_slab_math *const cells[KT_LEVELS] = {
      [KT_ISA_SCALAR] = &kt_slab_math_scalar,
#if KT_X86
      [KT_ISA_AVX2] = &kt_slab_math_avx2,
      [KT_ISA_AVX512] = &kt_slab_math_avx512,
      [KT_ISA_AMX] = &kt_slab_math_amx,
#endif
  };
  return KT_CELL(cells);
}
