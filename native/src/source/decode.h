/* decode.h - source matrices as binary32, and the search for NaN and infinity in them. */
#ifndef KT_DECODE_H
#define KT_DECODE_H

#include "matrix.h"

/* Decodes `count` rows from `row` into out; `stride` floats from one row to the next. */
typedef void kt_decode_rows_fn(const kt_matrix *matrix, int64_t row, int64_t count, float *out,
                               int64_t stride);

/* By the decoder that the dtype has for the level, else by its scalar one. */
kt_decode_rows_fn kt_decode_rows_scalar, kt_decode_rows_avx2, kt_decode_rows_avx512;
kt_decode_rows_fn *kt_decode_rows_best(void); /* that of the level in use */

/* The scalar cell of the dtype, which other cells leave matrices to. Cells do not multiply rows and
 * columns by their factors: who calls them does. */
kt_decode_rows_fn kt_decode_cell_scalar;

/* The cells of the table in decode.c. */
kt_decode_rows_fn kt_decode_bf16_scalar, kt_decode_f16_scalar, kt_decode_f32_scalar,
    kt_decode_e4m3_scalar, kt_decode_e2m1_scalar, kt_decode_u4_awq_scalar, kt_decode_i8_scalar;
kt_decode_rows_fn kt_decode_u2_scalar, kt_decode_u3_scalar, kt_decode_u4_scalar,
    kt_decode_u5_scalar, kt_decode_u6_scalar, kt_decode_u7_scalar, kt_decode_u8_scalar,
    kt_decode_i4_scalar, kt_decode_e0m3_scalar, kt_decode_e2m3_scalar;
kt_decode_rows_fn kt_decode_ggml_scalar, kt_decode_ggml_avx2, kt_decode_ggml_avx512;
kt_decode_rows_fn kt_decode_bf16_avx2, kt_decode_f16_avx2, kt_decode_f32_avx2, kt_decode_e4m3_avx2,
    kt_decode_u4_awq_avx2;
kt_decode_rows_fn kt_decode_bf16_avx512, kt_decode_f16_avx512, kt_decode_f32_avx512,
    kt_decode_e4m3_avx512;
kt_decode_rows_fn kt_decode_e2m1_avx512, kt_decode_i8_avx512, kt_decode_u4_awq_avx512,
    kt_decode_u2_avx512, kt_decode_u3_avx512, kt_decode_u4_avx512, kt_decode_u5_avx512,
    kt_decode_u6_avx512, kt_decode_u7_avx512, kt_decode_u8_avx512, kt_decode_i4_avx512,
    kt_decode_e0m3_avx512, kt_decode_e2m3_avx512;

/* The first NaN or Inf in row order, if there is one: KT_ERR_NONFINITE, else KT_OK.
 * `scratch` holds one row. */
kt_status kt_matrix_find_nonfinite(const kt_matrix *matrix, float *scratch, kt_position *bad);

#endif
