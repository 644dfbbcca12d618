#include "matrix.h"

/* One row per dtype; its decoders are a row in decode.c. */
static const kt_dtype_traits dtypes[KT_DTYPE_COUNT] = {
    [KT_BF16] = {{2, 1, 1}, 0},     [KT_F16] = {{2, 1, 1}, 0},
    [KT_F32] = {{4, 1, 1}, 0},      [KT_F8_E4M3] = {{1, 1, 1}, 1},
    [KT_F4_E2M1] = {{1, 1, 2}, 1},  [KT_U4] = {{4, 1, 8}, 1},
    [KT_U4_AWQ] = {{4, 8, 1}, 1},   [KT_I8] = {{1, 1, 1}, 1},
    [KT_U2] = {{4, 1, 16}, 1},      [KT_U3] = {{12, 1, 32}, 1},
    [KT_U5] = {{20, 1, 32}, 1},     [KT_U6] = {{12, 1, 16}, 1},
    [KT_U7] = {{28, 1, 32}, 1},     [KT_U8] = {{4, 1, 4}, 1},
    [KT_Q4_0] = {{18, 1, 32}, 0},   [KT_Q4_1] = {{20, 1, 32}, 0},
    [KT_Q5_0] = {{22, 1, 32}, 0},   [KT_Q5_1] = {{24, 1, 32}, 0},
    [KT_Q8_0] = {{34, 1, 32}, 0},   [KT_Q2_K] = {{84, 1, 256}, 0},
    [KT_Q3_K] = {{110, 1, 256}, 0}, [KT_Q4_K] = {{144, 1, 256}, 0},
    [KT_Q5_K] = {{176, 1, 256}, 0}, [KT_Q6_K] = {{210, 1, 256}, 0},
    [KT_IQ4_NL] = {{18, 1, 32}, 0}, [KT_IQ4_XS] = {{136, 1, 256}, 0},
    [KT_MXFP4] = {{17, 1, 32}, 0},  [KT_NVFP4] = {{36, 1, 64}, 0},
    [KT_TQ1_0] = {{54, 1, 256}, 0}, [KT_TQ2_0] = {{66, 1, 256}, 0},
    [KT_Q1_0] = {{18, 1, 128}, 0},  [KT_Q2_0] = {{18, 1, 64}, 0},
    [KT_I4] = {{1, 1, 2}, 1},       [KT_F4_E0M3] = {{1, 1, 2}, 1},
    [KT_F6_E2M3] = {{3, 1, 4}, 1},
};

const kt_dtype_traits *kt_dtype_find(int dtype) {
  return dtype >= 0 && dtype < KT_DTYPE_COUNT ? dtypes + dtype : NULL;
}

kt_status kt_dtype_unit(int dtype, kt_stored_unit *unit) {
  const kt_dtype_traits *const traits = kt_dtype_find(dtype);
  if (!traits || !unit) return KT_ERR_ARGUMENT;
  *unit = traits->unit;
  return KT_OK;
}

/* Limits below which no offset into a matrix, its grid, a decoded copy or scratch exceeds 63 bits,
 * nor does one to the end of a block that begins inside. */
static const int64_t most_bytes = INT64_MAX / 2, most_elements = INT64_MAX / 16,
                     most_cols = INT64_MAX / 128, most_to_origin = INT64_MAX / 4;

size_t kt_scratch_size(int64_t cols) {
  if (cols < 1 || cols > most_cols) return 0;
  return (size_t)kt_scratch_stride(cols) * (KT_STRIP_ROWS + KT_ROOM_ROWS) * sizeof(float);
}

/* Whether a * b <= most; a >= 0, b > 0. */
static int product_fits(int64_t a, int64_t b, int64_t most) { return a <= most / b; }

static int grid_fits(const kt_matrix *m) {
  if (m->block_rows > most_to_origin || m->block_cols > most_to_origin) return 0;
  if (m->row_origin > most_to_origin || m->col_origin > most_to_origin) return 0;
  const int64_t lines = (m->row_origin + m->rows - 1) / m->block_rows + 1;
  return product_fits(lines, m->scale_stride, most_elements);
}

/* Sizes and strides are above 0. */
static int elements_fit(const kt_matrix *m, kt_stored_unit unit) {
  if (m->cols > most_cols || !product_fits(m->rows, m->cols, most_elements)) return 0;
  const int64_t units = most_bytes / unit.bytes, high = (m->rows - 1) / unit.rows + 1;
  const int64_t wide = (m->first_col + m->cols - 1) / unit.cols + 1;
  return product_fits(high, m->row_stride, units) && product_fits(wide, m->col_stride, units);
}

static kt_status check_scales(const kt_matrix *m, int scaled) {
  if (m->row_scale && (m->row_factor || m->col_factor)) return KT_ERR_SCALE;
  if (!m->block_scale) return scaled || m->zero_point || m->group_of_col ? KT_ERR_SCALE : KT_OK;
  if (m->block_rows < 1 || m->block_cols < 1 || m->scale_stride < 1) return KT_ERR_SCALE;
  if (m->row_origin < 0 || m->col_origin < 0) return KT_ERR_SCALE;
  return grid_fits(m) ? KT_OK : KT_ERR_SCALE;
}

static kt_status check_units(const kt_matrix *m, kt_stored_unit unit) {
  if (!kt_is_ggml(m->dtype))
    return m->rows % unit.rows || m->cols % unit.cols || m->first_col ? KT_ERR_SHAPE : KT_OK;
  if (m->first_col < 0 || m->first_col >= unit.cols) return KT_ERR_SHAPE;
  return m->first_col % KT_CUT_COLS || m->cols % KT_CUT_COLS ? KT_ERR_SHAPE : KT_OK;
}

kt_status kt_matrix_check(const kt_matrix *m) {
  if (!m || !m->data || m->rows <= 0 || m->cols <= 0) return KT_ERR_ARGUMENT;
  const kt_dtype_traits *const traits = kt_dtype_find(m->dtype);
  if (!traits) return KT_ERR_ARGUMENT;
  if (m->row_stride < 1 || m->col_stride < 1) return KT_ERR_STRIDE;
  if (m->row_stride != 1 && m->col_stride != 1) return KT_ERR_STRIDE;
  const kt_status status = check_units(m, traits->unit);
  if (status) return status;
  if (!elements_fit(m, traits->unit)) return KT_ERR_SHAPE;
  return check_scales(m, traits->scaled);
}
