/* The table of weight formats, and the checks that all of them share. */
#include "gemm.h"

static const kt_gemm *const table[] = {
    [KT_KERNEL_INT8] = &kt_int8_gemm,   [KT_KERNEL_INT4] = &kt_int4_gemm,
    [KT_KERNEL_BF16] = &kt_bf16_gemm,   [KT_KERNEL_FP8] = &kt_fp8_gemm,
    [KT_KERNEL_MXFP4] = &kt_mxfp4_gemm, [KT_KERNEL_GINT4] = &kt_gint4_gemm,
};

const kt_gemm *kt_gemm_of(int kernel) {
  const int count = (int)(sizeof table / sizeof *table);
  return kernel >= 0 && kernel < count ? table[kernel] : NULL;
}

kt_product_fn *kt_gemm_product(const kt_gemm *gemm) { return KT_CELL(gemm->product); }

/* A row decoded by the scalar code fits the panel. */
_Static_assert(KT_MAX_COLS * sizeof(double) <= KT_PANEL_SIZE, "panel");

/* No layout takes more for an element, scales included: sizes are computed in 63 bits. */
enum { MOST_BYTES = 4 };

/* The table row of a layout that can hold [rows, cols], or NULL. */
static const kt_gemm *fitting(const kt_layout *layout, int64_t rows, int64_t cols) {
  const kt_gemm *gemm = layout ? kt_gemm_of(layout->kernel) : NULL;
  int64_t rows_step, cols_step;
  if (!gemm || rows < 1 || cols < 1 || cols > KT_MAX_COLS || rows > INT64_MAX / MOST_BYTES / cols ||
      !gemm->steps(layout, &rows_step, &cols_step))
    return NULL;
  return rows % rows_step == 0 && cols % cols_step == 0 ? gemm : NULL;
}

size_t kt_weight_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  const kt_gemm *gemm = fitting(layout, rows, cols);
  return gemm ? gemm->codes_size(layout, rows, cols) : 0;
}

size_t kt_weight_scale_size(const kt_layout *layout, int64_t rows, int64_t cols) {
  const kt_gemm *gemm = fitting(layout, rows, cols);
  return gemm ? gemm->scale_size(layout, rows, cols) : 0;
}

kt_status kt_weight_pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                         const void *scale, void *packed, void *packed_scale) {
  if (!layout || !kt_gemm_of(layout->kernel) || !codes || !packed) return KT_ERR_ARGUMENT;
  const kt_gemm *gemm = fitting(layout, rows, cols);
  if (!gemm) return KT_ERR_SHAPE;
  if (layout->scale_dtype != KT_SCALE_NONE && (!scale || !packed_scale)) return KT_ERR_ARGUMENT;
  return gemm->pack(layout, rows, cols, codes, scale, packed, packed_scale);
}
