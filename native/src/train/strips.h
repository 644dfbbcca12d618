/* strips.h - matrices, packed and plain, as strips of BF16 weights.
 *
 * A strip (gemm/bf16_gemm.h) is 32 rows of a BF16 matrix, tile after tile of 32 columns. What is
 * brought into this form is multiplied by the BF16 product of the level, whatever it was before:
 * the transposed products of every format, and those of LoRA matrices. */
#ifndef KT_STRIPS_H
#define KT_STRIPS_H

#include "../format/format.h"
#include "transposed.h"

/* Strip row i, column n = the code of w at (row n, column `column` + i), n < w->rows: the product
 * of the strip with rows of w->rows activations is one of the transpose of w. Codes are exact in
 * bf16. column % 32 == 0. strip: 64 * w->rows bytes, 64-byte aligned. A cell of a format's row,
 * kt_weight_format.transpose. */
kt_transpose_fn *kt_format_transpose(const kt_weight_format *format);

/* Whether strips of a layout lack its scales, which the activations must be multiplied by. There
 * are none (BF16), or strips contain them because they are powers of two (MXFP4, UE8M0): 0. */
int kt_scales_to_fold(const kt_layout *layout);

/* scale[n] = what a code of row n, of the group of column `column`, is worth, n < w->rows; codes
 * of INT4 are worth 16 scales. All columns of a group (w->layout.group; 0: all columns) have the
 * same. Only where there are scales to fold. scale: 64-byte aligned. */
void kt_fold_scales(const kt_weight *w, int64_t column, float *scale);

/* out[n] = bf16(row[n] * scale[n]), ties to even, NaN stays NaN; 0 with the sign of a product below
 * 2^-126, as which VDPBF16PS would read it anyway. n % 32 == 0; all 64-byte aligned. out may be
 * row. */
typedef void kt_fold_row_fn(const uint16_t *row, const float *scale, int64_t n, uint16_t *out);

/* scale, high and low of row[i] * factor[i], i < n (n % 64 == 0; all 64-byte aligned):
 *   scale = amax * fl32(1 / 32639), code = RNE(row[i] * factor[i] * fl32(1 / scale)),
 *   low = the lower byte as a signed number, high = (code - low) / 256
 * All are 0 where scale is 0 or denormal; where the row holds a NaN or Inf, codes are 0 and the
 * scale is NaN, as in kt_rows_quantize. Same bits on every level. Returns the scale. */
#define KT_SPLIT_STEP (1.0f / 32639.0f) /* 127 * 256 + 127 */
typedef float kt_split_row_fn(const uint16_t *row, const float *factor, int64_t n, int8_t *high,
                              int8_t *low);

/* A plain matrix [rows, cols] of KT_BF16 or KT_F32, rows side by side. */
typedef struct kt_plain {
  const void *data; /* aligned to its type */
  int64_t rows, cols;
  int dtype;
} kt_plain;

/* Strips of `count` columns (a multiple of 32), of a plain matrix rounded to bf16, ties to even,
 * and surrounded by zeros:
 *   rows     strip row i, column k = m[first + i][k - shift]
 *   columns  strip row i, column k = m[k - shift][first + i]
 * strip: 64 * count bytes, 64-byte aligned. */
typedef void kt_strip_fn(const kt_plain *m, int64_t first, int64_t shift, int64_t count,
                         uint8_t *strip);

typedef struct kt_strips {
  kt_strip_fn *rows, *columns;
  kt_fold_row_fn *fold;
  kt_split_row_fn *split;
} kt_strips;

extern const kt_strips kt_strips_scalar, kt_strips_avx512;
extern const kt_strips *const kt_strips_of[KT_LEVELS]; /* KT_CELL */

/* As the product of BF16 weights (moe/gemm.h), but out += it: each element is the same chain of
 * sums, begun with what out has (scalar: one sum in binary64, rounded, then added). The cell for
 * the level in use. For strips in a cache. */
kt_product_fn *kt_bf16_adding_product(void);

/* The same of one strip between streamed products; NULL where none are. */
kt_adding_stream_fn *kt_bf16_adding_stream(void);

#endif
