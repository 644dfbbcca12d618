/* Blocks of ggml for any CPU: the reference. */
#include "decode.h"
#include "ggml_bytes_scalar.h"

#include "decode_ggml_loop.h"

void kt_decode_ggml_scalar(const kt_matrix *m, int64_t row, int64_t count, float *out,
                           int64_t stride) {
  ggml_rows(m, row, count, out, stride);
}
