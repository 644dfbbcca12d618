/* Which product of a format runs, and what the kernels can multiply with. */
#include "gemm.h"

#include "../format/format.h"

kt_product_fn *kt_format_product(const kt_weight_format *format) {
  return KT_CELL(format->product);
}

/* A row decoded by the scalar code fits the panel. */
_Static_assert(KT_MAX_COLS * sizeof(double) <= KT_PANEL_SIZE, "panel");

kt_status kt_product_check(const kt_layout *layout, int64_t rows, int64_t cols) {
  const kt_status status = kt_layout_check(layout, rows, cols);
  if (status) return status;
  if (!kt_format_of(layout)->product[KT_ISA_SCALAR]) return KT_ERR_UNSUPPORTED;
  return cols > KT_MAX_COLS ? KT_ERR_SHAPE : KT_OK;
}
