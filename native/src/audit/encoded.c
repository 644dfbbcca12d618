/* Public entry point of the comparison of encoded weights: check, pick the level, call. */
#include "encoded.h"

#include "../cpu.h"
#include "../simd/float_mode.h"
#include "../source/matrix.h"

static kt_encoded_fn *const levels[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_encoded_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_encoded_avx2,
    [KT_ISA_AVX512] = kt_encoded_avx512,
#endif
};

kt_status kt_encoded_auditable(const kt_encoding *encoding, const kt_matrix *source) {
  const int64_t group = encoding->group ? encoding->group : source->cols;
  if (source->cols % 32 || (group % 32 && encoding->kind != KT_ENCODE_NVFP4)) return KT_ERR_SHAPE;
  return source->rows % 32 && source->col_stride != 1 ? KT_ERR_SHAPE : KT_OK;
}

kt_status kt_audit_encoded(const kt_encoding *encoding, const kt_matrix *source, float tensor_scale,
                           const void *codes, const void *scales, kt_encoded_audit *audit) {
  kt_encoded sizes;
  kt_status status = kt_matrix_check(source);
  if (!status) status = kt_encoded_sizes(encoding, source->rows, source->cols, &sizes);
  if (status) return status;
  if (!codes || (!scales && sizes.scale_size) || !audit) return KT_ERR_ARGUMENT;
  const int kind = encoding->kind;
  if (kind == KT_ENCODE_NVFP4 && !(tensor_scale > 0 && tensor_scale <= 3.402823466e38f))
    return KT_ERR_SCALE;
  const int64_t group = encoding->group ? encoding->group : source->cols;
  const int tall = kind == KT_ENCODE_FP8 && encoding->group;
  if ((status = kt_encoded_auditable(encoding, source))) return status;
  *audit = (kt_encoded_audit){0};
  const kt_encoded_job job = {
      .source = source,
      .kind = kind,
      .bits = kind == KT_ENCODE_INT8 || kind == KT_ENCODE_FP8 || kind == KT_ENCODE_MXFP8 ? 8 : 4,
      .tall = tall,
      .tensor_scale = tensor_scale,
      .half = encoding->half,
      .search = encoding->search,
      .group = group,
      .groups = sizes.scale_cols,
      .codes = codes,
      .scales = scales};
  const uint64_t mode = kt_float_mode_enter();
  KT_CELL(levels)(&job, audit);
  kt_float_mode_leave(mode);
  return KT_OK;
}
