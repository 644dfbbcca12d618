/* Public entry points of quantizing: check, pick format and level, call. */
#include "../cpu.h"
#include "../simd/float_mode.h"
#include "../source/decode.h"
#include "rows.h"

static const kt_choice amax = {.rule = KT_RULE_AMAX};

kt_status kt_choice_check(const kt_choice *choice, int64_t cols) {
  if (choice->rule < KT_RULE_AMAX || choice->rule > KT_RULE_SEARCH) return KT_ERR_ARGUMENT;
  if (!choice->importance) return KT_OK;
  if (choice->rule == KT_RULE_AMAX) return KT_ERR_ARGUMENT;
  for (int64_t k = 0; k < cols; k++)
    if (!(choice->importance[k] >= 0 && choice->importance[k] <= 0x1p32f)) return KT_ERR_ARGUMENT;
  return KT_OK;
}

static kt_status check(const kt_layout *layout, const kt_matrix *m, const kt_choice *choice,
                       const void *scratch, size_t scratch_size) {
  kt_status status = kt_matrix_check(m);
  if (!status) status = kt_layout_check(layout, m->rows, m->cols);
  if (!status && !kt_format_of(layout)->max_level) status = KT_ERR_UNSUPPORTED;
  if (!status) status = kt_choice_check(choice, m->cols);
  if (!status && (!scratch || scratch_size < kt_scratch_size(m->cols))) status = KT_ERR_SCRATCH;
  return status;
}

kt_status kt_quantize(const kt_layout *layout, const kt_matrix *matrix, const kt_choice *choice,
                      void *codes, void *scale, void *scratch, size_t scratch_size,
                      kt_position *bad) {
  choice = choice ? choice : &amax;
  kt_status status = check(layout, matrix, choice, scratch, scratch_size);
  if (status) return status;
  if (!codes || !scale) return KT_ERR_ARGUMENT;
  const uint64_t mode = kt_float_mode_enter();
  status = kt_quantize_rows(layout, matrix, choice, codes, scale, scratch);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}

kt_status kt_quantize_pack(const kt_layout *layout, const kt_matrix *matrix,
                           const kt_choice *choice, void *packed, void *packed_scale, void *scratch,
                           size_t scratch_size, kt_position *bad) {
  choice = choice ? choice : &amax;
  kt_status status = check(layout, matrix, choice, scratch, scratch_size);
  if (status) return status;
  if (!packed || !packed_scale) return KT_ERR_ARGUMENT;
  const kt_weight_format *format = kt_format_of(layout);
  const uint64_t mode = kt_float_mode_enter();
  status = KT_CELL(format->quantize_pack)(layout, matrix, choice, packed, packed_scale, scratch);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}
