/* The layout of what a forward keeps. */
#include "saved.h"

static int64_t groups_of(const kt_moe *moe, const kt_adapter *adapter, int64_t width) {
  const kt_rows_kind kind = kt_rows_of(moe, adapter);
  if (kind == KT_ROWS_BF16) return 0;
  return kind == KT_ROWS_GROUP ? width / moe->layout.group : 1;
}

size_t kt_saved_at(const kt_moe *moe, const kt_adapter *adapter, int64_t pairs, void *memory,
                   kt_saved *saved) {
  const int64_t width = moe->intermediate / moe->parts, groups = groups_of(moe, adapter, width);
  const int64_t rows = moe->parts * pairs;
  const int64_t inner = (1 + kt_has_gate(moe->activation.function)) * width;
  const int64_t pair = kt_adapts_x(adapter) ? 2 * adapter->rank : 0;
  const int64_t down = kt_adapts(adapter, KT_DOWN) ? adapter->rank : 0;
  kt_arena a = {memory, 0};
  *saved = (kt_saved){
      .inner = kt_take(&a, rows * inner, sizeof(uint16_t)),
      .codes = kt_take(&a, groups ? rows * width : 0, 1),
      .scale = kt_take(&a, rows * groups, sizeof(float)),
      .x_products = kt_take(&a, pairs * pair, sizeof(float)),
      .products = kt_take(&a, rows * down, sizeof(float)),
      .pairs = pairs,
      .inner_cols = inner,
      .groups = groups,
  };
  return a.used;
}
