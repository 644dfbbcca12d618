/* Public entry points of encodings: check, pick the level, call. */
#include "encode.h"

#include "../cpu.h"
#include "../simd/float_mode.h"

/* Bits of a code, the groups that a kind has (0: what divides the columns, or a whole row), and
 * bytes of a scale. */
typedef struct kind_traits {
  int32_t bits, group, scale_size;
} kind_traits;

static const kind_traits kinds[] = {
    [KT_ENCODE_INT4] = {4, 0, 2},   [KT_ENCODE_INT8] = {8, 0, 2},   [KT_ENCODE_FP8] = {8, 128, 4},
    [KT_ENCODE_MXFP4] = {4, 32, 1}, [KT_ENCODE_MXFP8] = {8, 32, 1}, [KT_ENCODE_NVFP4] = {4, 16, 1},
    [KT_ENCODE_BF16] = {16, 0, 0},
};

static kt_encode_fn *const levels[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_encode_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_encode_avx2,
    [KT_ISA_AVX512] = kt_encode_avx512,
#endif
};

static int is_int(const kt_encoding *encoding) {
  return encoding->kind == KT_ENCODE_INT4 || encoding->kind == KT_ENCODE_INT8;
}

static kt_status check(const kt_encoding *encoding, int64_t rows, int64_t cols) {
  const int count = (int)(sizeof kinds / sizeof *kinds);
  if (!encoding || encoding->kind < 0 || encoding->kind >= count || rows < 1 || cols < 1)
    return KT_ERR_ARGUMENT;
  if (cols > INT64_MAX / 16 / rows - 32) return KT_ERR_SHAPE; /* 16 bits are the widest code */
  if (encoding->half != 0 && (encoding->half != 1 || !is_int(encoding))) return KT_ERR_ARGUMENT;
  if (encoding->search != 0 && (encoding->search != 1 || !is_int(encoding))) return KT_ERR_ARGUMENT;
  const int32_t group = encoding->group, own = kinds[encoding->kind].group;
  if (group < 0 || (group == 0 && own && own != KT_ENCODE_BLOCK)) return KT_ERR_ARGUMENT;
  if (group && own && group != own) return KT_ERR_ARGUMENT;
  if (group && encoding->kind == KT_ENCODE_BF16) return KT_ERR_ARGUMENT;
  if (encoding->kind == KT_ENCODE_FP8) return KT_OK; /* the last block may be cut */
  return group && cols % group ? KT_ERR_SHAPE : KT_OK;
}

kt_status kt_encoded_sizes(const kt_encoding *encoding, int64_t rows, int64_t cols,
                           kt_encoded *sizes) {
  const kt_status status = check(encoding, rows, cols);
  if (status || !sizes) return status ? status : KT_ERR_ARGUMENT;
  const kind_traits *const kind = kinds + encoding->kind;
  const int64_t group = encoding->group ? encoding->group : cols;
  const int64_t word = is_int(encoding) ? 32 : 8; /* bits that a row is a multiple of */
  const int64_t words = (cols * kind->bits + word - 1) / word;
  const int blocks = encoding->kind == KT_ENCODE_FP8 && encoding->group;
  *sizes =
      (kt_encoded){.row_size = words * word / 8,
                   .scale_rows = blocks ? (rows + KT_ENCODE_BLOCK - 1) / KT_ENCODE_BLOCK : rows,
                   .scale_cols = kind->scale_size ? (cols + group - 1) / group : 0,
                   .scale_size = kind->scale_size};
  return KT_OK;
}

kt_status kt_encode(const kt_encoding *encoding, const kt_matrix *matrix, float tensor_scale,
                    void *codes, void *scales, void *scratch, size_t scratch_size,
                    kt_position *bad) {
  kt_encoded sizes;
  kt_status status = kt_matrix_check(matrix);
  if (!status) status = kt_encoded_sizes(encoding, matrix->rows, matrix->cols, &sizes);
  if (status) return status;
  if (!codes || (!scales && sizes.scale_size)) return KT_ERR_ARGUMENT;
  if (encoding->kind == KT_ENCODE_NVFP4 && !(tensor_scale > 0 && tensor_scale <= 3.402823466e38f))
    return KT_ERR_SCALE;
  if (!scratch || scratch_size < kt_scratch_size(matrix->cols)) return KT_ERR_SCRATCH;
  const kt_encode_job job = {.encoding = encoding,
                             .source = matrix,
                             .group = encoding->group ? encoding->group : matrix->cols,
                             .groups = sizes.scale_cols,
                             .row_size = sizes.row_size,
                             .tensor_scale = tensor_scale,
                             .codes = codes,
                             .scales = scales,
                             .scratch = scratch,
                             .decode = kt_decode_rows_best()};
  const uint64_t mode = kt_float_mode_enter();
  status = KT_CELL(levels)(&job);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}

kt_status kt_largest(const kt_matrix *matrix, float *largest, void *scratch, size_t scratch_size,
                     kt_position *bad) {
  kt_status status = kt_matrix_check(matrix);
  if (status) return status;
  if (!largest) return KT_ERR_ARGUMENT;
  if (!scratch || scratch_size < kt_scratch_size(matrix->cols)) return KT_ERR_SCRATCH;
  const kt_encode_job job = {
      .source = matrix, .scratch = scratch, .largest = largest, .decode = kt_decode_rows_best()};
  const uint64_t mode = kt_float_mode_enter();
  status = KT_CELL(levels)(&job);
  if (status == KT_ERR_NONFINITE) status = kt_matrix_find_nonfinite(matrix, scratch, bad);
  kt_float_mode_leave(mode);
  return status;
}
