#include "matrix.h"

/* One row per dtype; its decoders are a row in decode.c. */
static const kt_dtype_traits dtypes[KT_DTYPE_COUNT] = {
    [KT_BF16] = {{2, 1, 1}, 0},    [KT_F16] = {{2, 1, 1}, 0},     [KT_F32] = {{4, 1, 1}, 0},
    [KT_F8_E4M3] = {{1, 1, 1}, 1}, [KT_F4_E2M1] = {{1, 1, 2}, 1}, [KT_U4] = {{4, 1, 8}, 1},
    [KT_U4_AWQ] = {{4, 8, 1}, 1},  [KT_I8] = {{1, 1, 1}, 1},      [KT_U2] = {{4, 1, 16}, 1},
    [KT_U3] = {{12, 1, 32}, 1},    [KT_U5] = {{20, 1, 32}, 1},    [KT_U6] = {{12, 1, 16}, 1},
    [KT_U7] = {{28, 1, 32}, 1},    [KT_U8] = {{4, 1, 4}, 1},
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

size_t kt_scratch_size(int64_t cols) {
  return cols > 0 ? (size_t)kt_scratch_stride(cols) * KT_STRIP_ROWS * sizeof(float) : 0;
}

static kt_status check_scales(const kt_matrix *m, int scaled) {
  if (scaled != (m->block_scale != NULL)) return KT_ERR_SCALE;
  if (!scaled) return m->zero_point || m->group_of_col ? KT_ERR_SCALE : KT_OK;
  if (m->block_rows < 1 || m->block_cols < 1 || m->scale_stride < 1) return KT_ERR_SCALE;
  return m->row_origin < 0 || m->col_origin < 0 ? KT_ERR_SCALE : KT_OK;
}

kt_status kt_matrix_check(const kt_matrix *m) {
  if (!m || !m->data || m->rows <= 0 || m->cols <= 0) return KT_ERR_ARGUMENT;
  const kt_dtype_traits *const traits = kt_dtype_find(m->dtype);
  if (!traits) return KT_ERR_ARGUMENT;
  if (m->row_stride < 1 || m->col_stride < 1) return KT_ERR_STRIDE;
  if (m->row_stride != 1 && m->col_stride != 1) return KT_ERR_STRIDE;
  if (m->rows % traits->unit.rows || m->cols % traits->unit.cols) return KT_ERR_SHAPE;
  return check_scales(m, traits->scaled);
}
