/* Which function decodes which dtype on which level, and who needs just that. */
#include "decode.h"

#include "../cpu.h"
#include "../simd/bits.h"
#include "../simd/float_mode.h"

#if KT_X86
#define CELLS(name)                                                                                \
  {[KT_ISA_SCALAR] = kt_decode_##name##_scalar,                                                    \
   [KT_ISA_AVX2] = kt_decode_##name##_avx2,                                                        \
   [KT_ISA_AVX512] = kt_decode_##name##_avx512}
#define PACKED(name)                                                                               \
  {[KT_ISA_SCALAR] = kt_decode_##name##_scalar, [KT_ISA_AVX512] = kt_decode_##name##_avx512}
#else
#define CELLS(name) {[KT_ISA_SCALAR] = kt_decode_##name##_scalar}
#define PACKED CELLS
#endif

/* One row per dtype, with the scalar decoder at least. */
static kt_decode_rows_fn *const decoders[KT_DTYPE_COUNT][KT_LEVELS] = {
    [KT_BF16] = CELLS(bf16),     [KT_F16] = CELLS(f16),       [KT_F32] = CELLS(f32),
    [KT_F8_E4M3] = CELLS(e4m3),  [KT_F4_E2M1] = PACKED(e2m1), [KT_U4_AWQ] = CELLS(u4_awq),
    [KT_I8] = PACKED(i8),        [KT_U2] = PACKED(u2),        [KT_U3] = PACKED(u3),
    [KT_U4] = PACKED(u4),        [KT_U5] = PACKED(u5),        [KT_U6] = PACKED(u6),
    [KT_U7] = PACKED(u7),        [KT_U8] = PACKED(u8),        [KT_Q4_0] = CELLS(ggml),
    [KT_Q4_1] = CELLS(ggml),     [KT_Q5_0] = CELLS(ggml),     [KT_Q5_1] = CELLS(ggml),
    [KT_Q8_0] = CELLS(ggml),     [KT_Q2_K] = CELLS(ggml),     [KT_Q3_K] = CELLS(ggml),
    [KT_Q4_K] = CELLS(ggml),     [KT_Q5_K] = CELLS(ggml),     [KT_Q6_K] = CELLS(ggml),
    [KT_IQ4_NL] = CELLS(ggml),   [KT_IQ4_XS] = CELLS(ggml),   [KT_MXFP4] = CELLS(ggml),
    [KT_NVFP4] = CELLS(ggml),    [KT_TQ1_0] = CELLS(ggml),    [KT_TQ2_0] = CELLS(ggml),
    [KT_Q1_0] = CELLS(ggml),     [KT_Q2_0] = CELLS(ggml),     [KT_I4] = PACKED(i4),
    [KT_F4_E0M3] = PACKED(e0m3), [KT_F6_E2M3] = PACKED(e2m3),
};

void kt_decode_cell_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,
                           int64_t stride) {
  decoders[m->dtype][KT_ISA_SCALAR](m, row, count, out, stride);
}

/* By the factors of their rows and columns. */
static void multiply_rows(const kt_matrix *m, int64_t row, int64_t count, float *out,
                          int64_t stride) {
  if (!m->row_factor && !m->col_factor) return;
  for (int64_t n = row; n < row + count; n++, out += stride) {
    for (int64_t k = 0; m->row_factor && k < m->cols; k++) out[k] *= m->row_factor[n];
    for (int64_t k = 0; m->col_factor && k < m->cols; k++) out[k] *= m->col_factor[k];
  }
}

#define DECODE_ROWS(name, level)                                                                   \
  void kt_decode_rows_##name(const kt_matrix *m, int64_t row, int64_t count, float *out,           \
                             int64_t stride) {                                                     \
    kt_decode_rows_fn *const *const cells = decoders[m->dtype];                                    \
    (cells[level] ? cells[level] : cells[KT_ISA_SCALAR])(m, row, count, out, stride);              \
    multiply_rows(m, row, count, out, stride);                                                     \
  }

DECODE_ROWS(scalar, KT_ISA_SCALAR)
#if KT_X86
DECODE_ROWS(avx2, KT_ISA_AVX2)
DECODE_ROWS(avx512, KT_ISA_AVX512)
#endif

static kt_decode_rows_fn *const of_level[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_decode_rows_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_decode_rows_avx2,
    [KT_ISA_AVX512] = kt_decode_rows_avx512,
#endif
};

kt_decode_rows_fn *kt_decode_rows_best(void) { return KT_CELL(of_level); }

kt_status kt_decode(const kt_matrix *matrix, float *out) {
  const kt_status status = kt_matrix_check(matrix);
  if (status) return status;
  if (!out) return KT_ERR_ARGUMENT;
  const uint64_t mode = kt_float_mode_enter();
  kt_decode_rows_fn *const decode = KT_CELL(decoders[matrix->dtype]);
  for (int64_t row = 0; row < matrix->rows; row += KT_STRIP_ROWS) { /* fast decoders do so many */
    const int64_t left = matrix->rows - row;
    const int64_t count = left < KT_STRIP_ROWS ? left : KT_STRIP_ROWS;
    decode(matrix, row, count, out + row * matrix->cols, matrix->cols);
    multiply_rows(matrix, row, count, out + row * matrix->cols, matrix->cols);
  }
  kt_float_mode_leave(mode);
  return KT_OK;
}

kt_status kt_matrix_find_nonfinite(const kt_matrix *m, float *scratch, kt_position *bad) {
  for (int64_t row = 0; row < m->rows; row++) {
    kt_decode_rows_scalar(m, row, 1, scratch, m->cols);
    for (int64_t col = 0; col < m->cols; col++) {
      if ((kt_bits(scratch[col]) & 0x7f800000u) != 0x7f800000u) continue;
      if (bad) *bad = (kt_position){row, col};
      return KT_ERR_NONFINITE;
    }
  }
  return KT_OK;
}
