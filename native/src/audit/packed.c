/* Public entry points of the audit: check, pick the level, call. */
#include "packed.h"

#include "../cpu.h"
#include "../simd/float_mode.h"
#include "../source/matrix.h"

enum { STEPS = 34 };

/* ---- The rules of docs/formats.md, once more --------------------------------- *
 *
 * Scales: SPEC 3.2 and 8.4. Denormals on the way become 0. */

static float flushed(float value) { return value < 0x1p-126f ? 0.0f : value; }

static float int8_rule(float amax) {
  return flushed(flushed(amax) * 0x1.020408p-7f);
} /* fl32(1/127) */

static float int4_rule(float amax) { return flushed((float)((double)amax / 112.0)); }

static float gint4_rule(float amax) { return flushed((float)((double)amax / 7.0)); }

static const kt_audit_format int8 = {1, 64, 1.0f, 127.0f, int8_rule};
static const kt_audit_format int4 = {2, 128, 16.0f, 7.0f, int4_rule};
static const kt_audit_format gint4 = {2, 0, 1.0f, 7.0f, gint4_rule};

static const kt_audit_format gint8 = {1, 0, 1.0f, 127.0f, int8_rule};

static const kt_audit_format *format_of(const kt_layout *layout) {
  switch (layout->format) {
  case KT_FORMAT_INT8: return &int8;
  case KT_FORMAT_INT4: return &int4;
  case KT_FORMAT_GINT4: return &gint4;
  case KT_FORMAT_GINT8: return &gint8;
  default: return NULL;
  }
}

/* *found: what a layout is audited by. */
static kt_status check_packed(const kt_layout *layout, int64_t rows, int64_t cols,
                              const kt_audit_format **found) {
  kt_layout_traits traits;
  if (!layout || rows < 1 || cols < 1 || kt_layout_describe(layout, &traits))
    return KT_ERR_ARGUMENT;
  const kt_audit_format *format = format_of(layout);
  if (!format) return KT_ERR_UNSUPPORTED;
  if (cols > INT64_MAX / 8 / rows) return KT_ERR_SHAPE;
  *found = format;
  const int64_t whole = layout->group ? layout->group : kt_audit_tile_cols(format);
  return rows % 32 || cols % whole ? KT_ERR_SHAPE : KT_OK;
}

static kt_audit_fn *const audits[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_audit_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_audit_avx2,
    [KT_ISA_AVX512] = kt_audit_avx512,
#endif
};

static kt_audit_sums_fn *const sums[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_audit_sums_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_audit_sums_avx2,
    [KT_ISA_AVX512] = kt_audit_sums_avx512,
    [KT_ISA_AVX512_VNNI] = kt_audit_sums_vnni,
#endif
};

static kt_status check_choice(const kt_choice *choice, int64_t cols) {
  if (!choice) return KT_OK;
  if (choice->rule == KT_RULE_AMAX) return choice->importance ? KT_ERR_ARGUMENT : KT_OK;
  if (choice->rule != KT_RULE_SEARCH_1 && choice->rule != KT_RULE_SEARCH) return KT_ERR_ARGUMENT;
  for (int64_t k = 0; choice->importance && k < cols; k++)
    if (!(choice->importance[k] >= 0 && choice->importance[k] <= 0x1p32f)) return KT_ERR_ARGUMENT;
  return KT_OK;
}

/* docs/formats.md 3.8: rows that are searched in fixed point. */
static int is_fixed(const kt_layout *layout, const kt_choice *choice) {
  if (!choice || choice->rule != KT_RULE_SEARCH) return 0;
  return layout->group == 0 && choice->importance == NULL;
}

/* Its steps of INT4, from number -2 on: 1.04^-n sevenths of 32767. */
static void int4_steps(int steps[STEPS]) {
  double step = 32767.0 / 7.0 * 1.04 * 1.04;
  for (int n = 0; n < STEPS; n++, step /= 1.04) steps[n] = (int)(step + 0.5);
}

kt_status kt_audit_run(const kt_layout *layout, const kt_matrix *source, const kt_choice *choice,
                       int64_t rows, int64_t first, const void *packed, const void *packed_scale,
                       float *error, float *amax, float *rule, double *squared, kt_audit *audit,
                       void *scratch, size_t scratch_size) {
  if (!packed || !packed_scale || !error || !amax || !rule || !audit) return KT_ERR_ARGUMENT;
  const kt_audit_format *format;
  kt_status status = kt_matrix_check(source);
  if (!status) status = check_packed(layout, rows, source->cols, &format);
  if (!status) status = check_choice(choice, source->cols);
  if (status) return status;
  if (!scratch || scratch_size < kt_scratch_size(source->cols)) return KT_ERR_SCRATCH;
  if (source->rows % 32 || first % 32 || first < 0 || first > rows - source->rows)
    return KT_ERR_SHAPE;
  *audit = (kt_audit){0};
  const int64_t group = layout->group ? layout->group : source->cols;
  int steps[STEPS];
  int4_steps(steps);
  const kt_audit_job job = {.format = format,
                            .source = source,
                            .rows = rows,
                            .first = first,
                            .packed = packed,
                            .scale = packed_scale,
                            .group = group,
                            .groups = source->cols / group,
                            .bf16_scales = layout->scale_dtype == KT_SCALE_BF16,
                            .error = error,
                            .amax = amax,
                            .rule = rule,
                            .squared = squared,
                            .searched = choice && choice->rule != KT_RULE_AMAX,
                            .fixed = is_fixed(layout, choice),
                            .sums = KT_CELL(sums),
                            .steps = steps,
                            .importance = choice ? choice->importance : NULL,
                            .scratch = scratch};
  const uint64_t mode = kt_float_mode_enter();
  KT_CELL(audits)(&job, audit);
  kt_float_mode_leave(mode);
  return KT_OK;
}

kt_status kt_audit_codes(const kt_layout *layout, const void *packed, int64_t rows, int64_t cols,
                         int8_t *codes) {
  if (!packed || !codes) return KT_ERR_ARGUMENT;
  const kt_audit_format *format;
  const kt_status status = check_packed(layout, rows, cols, &format);
  if (status) return status;
  kt_audit_codes_scalar(format, packed, rows, cols, codes);
  return KT_OK;
}
