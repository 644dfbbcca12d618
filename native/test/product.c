/* product.c - entry points to what the MoE forward calls, for tests (tests/native/kernels).
 * Linked with a copy of the compiled module. */
#include "../src/cpu.h"
#include "../src/format/format.h"
#include "../src/moe/epilogue.h"

int32_t kt_test_max_tokens(void) { return KT_MAX_TOKENS; }
int32_t kt_test_max_strips(void) { return KT_MAX_STRIPS; }
int32_t kt_test_max_products(void) { return KT_MAX_PRODUCTS; }
int64_t kt_test_panel_size(void) { return KT_PANEL_SIZE; }

/* Bytes from one activation row to the next. */
int64_t kt_test_stride(const kt_layout *layout, int64_t cols) {
  return (int64_t)kt_rows_stride(kt_format_of(layout)->rows_kind, cols, layout->group);
}

/* Activation rows of x, row-major [tokens, cols]. */
void kt_test_rows(const kt_layout *layout, int64_t tokens, int64_t cols, const float *x,
                  uint8_t *rows) {
  const int64_t stride = kt_test_stride(layout, cols);
  for (int64_t t = 0; t < tokens; t++)
    kt_rows_quantize(kt_format_of(layout)->rows_kind, cols, layout->group, x + t * cols,
                     rows + t * stride);
}

/* Whether a level has a product of its own for this layout that this CPU can run. */
int kt_test_has_product(const kt_layout *layout, int isa) {
  kt_product_fn *below = NULL;
  for (int i = 0; kt_isa_at(i) != isa && kt_isa_use(kt_isa_at(i)) == KT_OK; i++)
    below = kt_format_product(kt_format_of(layout));
  return kt_isa_use(isa) == KT_OK && kt_format_product(kt_format_of(layout)) != below;
}

/* See kt_product_fn; at the level of the last kt_test_has_product or kt_isa_use. */
void kt_test_product(const kt_layout *layout, int64_t rows, int64_t cols, const uint8_t *codes,
                     const void *scale, int64_t strip, int64_t strips, const uint8_t *x,
                     int64_t tokens, float *out, uint8_t *panel) {
  const kt_weight w = {codes, scale, rows, cols, *layout};
  kt_format_product(kt_format_of(layout))(&w, strip, strips, x, kt_test_stride(layout, cols),
                                          tokens, out, panel);
}

/* kt_epilogue's activate at a level; pointers and stride as kt_inner's. 0 if this CPU lacks the
 * level. */
int kt_test_activate(int isa, const kt_activation *activation, int64_t strips, int64_t tokens,
                     const float *gate, const float *up, const float *gate_bias,
                     const float *up_bias, float *out, int64_t stride) {
  if (kt_isa_use(isa) != KT_OK) return 0;
  const kt_epilogue *const level = KT_CELL(kt_epilogues);
  const kt_inner inner = {.gate = kt_sums_of(gate, tokens),
                          .up = kt_sums_of(up, tokens),
                          .gate_bias = gate_bias,
                          .up_bias = up_bias,
                          .strips = strips,
                          .out = out,
                          .stride = stride};
  level->activate[activation->function](activation, &inner, 0, tokens);
  return 1;
}
