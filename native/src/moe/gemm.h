/* gemm.h - what a weight format must provide to the MoE forward, as cells of its row in
 * format/format.h.
 *
 * All formats cut a matrix [rows, cols] into strips of 32 rows. A strip times a few rows
 * of activations is the unit of work ("product"); loops over strips, experts, threads and
 * NUMA parts are the driver's (forward.c), so a format writes only its inner loops. */
#ifndef KT_GEMM_H
#define KT_GEMM_H

#include "../cpu.h"
#include "ktconv.h"

enum {
  KT_STRIP = 32,                /* rows of a strip */
  KT_MAX_STRIPS = 16,           /* strips of one product call */
  KT_MAX_TOKENS = 96,           /* activation rows of one product call */
  KT_MAX_PRODUCTS = 4 * 96,     /* strips * activation rows of one product call */
  KT_STREAM_TOKENS = 256,       /* activation rows of one streamed product */
  KT_PANEL_SIZE = 32 * 4096 * 2 /* bytes of scratch of one product call */
};

/* A packed matrix, its sizes checked. codes needs no alignment, scale that of its type. */
typedef struct kt_weight {
  const uint8_t *codes;
  const void *scale;
  int64_t rows, cols;
  kt_layout layout;
} kt_weight;

typedef struct kt_weight_format kt_weight_format;

/* Activation rows, as a format wants them: one row per token, `stride` bytes apart. */
typedef enum kt_rows_kind {
  KT_ROWS_INT8,  /* int8 codes, one scale per row */
  KT_ROWS_GROUP, /* int8 codes, one scale per `group` columns */
  KT_ROWS_BF16
} kt_rows_kind;

/* out[s][t][r] = sum over k of w[32 * (strip + s) + r][k] * x[t][k], scales applied, for
 * s < strips <= KT_MAX_STRIPS, t < tokens <= KT_MAX_TOKENS, strips * tokens <=
 * KT_MAX_PRODUCTS, r < 32: binary32, 64-byte aligned, s-major with t rows of 32. x: rows of the
 * format's kind, 64-byte aligned, stride a multiple of 64. panel: KT_PANEL_SIZE bytes, 64-byte
 * aligned, the thread's own. out may hold unfinished sums during the call.
 *
 * The value of an element depends on its row of w and its row of x alone: not on
 * strips, tokens or the position among them. So results do not depend on the batch. */
typedef void kt_product_fn(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel);

/* ---- Strips one after the other ------------------------------------------
 *
 * Where products take little time, what is done between them counts: fetching weights, scaling
 * sums, the activation, the weighted sum. A streamed product does it within its loops (beside.h),
 * and leaves sums as they come out of its registers. */

/* Sums [strips][tokens][32] of a product, and what makes numbers of them:
 *   whole    fl(fl(fl32(sum >> shift) * fl(step * row_scale[32 s + r])) * scale of token t)
 *   others   fl(sum * row_scale[32 s + r]), or the sum itself where there is none
 * to which those of `plus` are added. */
typedef struct kt_sums {
  const void *sum; /* int32 or float */
  int32_t whole, shift;
  float step;
  int64_t tokens;
  const float *row_scale;
  const uint8_t *x_scale; /* the float of token t: at x_scale + t * stride */
  int64_t stride;
  const float *plus; /* NULL, or [strips][tokens][32]; of gate and up both or none has some */
} kt_sums;

/* Of numbers, as kt_product_fn leaves them. */
static inline kt_sums kt_sums_of(const float *numbers, int64_t tokens) {
  return (kt_sums){.sum = numbers, .tokens = tokens};
}

/* One strip for 1 .. KT_STREAM_TOKENS `tokens`, rows x; sums: [tokens][32],
 * 64-byte aligned. The numbers are those of kt_product_fn, and on no more does an element depend.
 */
typedef struct kt_beside kt_beside;
typedef void kt_stream_fn(const kt_weight *w, int64_t strip, const uint8_t *x, int64_t stride,
                          int64_t tokens, kt_beside *beside, void *out, kt_sums *sums);

/* out += such a product of a strip of BF16 weights in a cache: the bits of the product that adds
 * (train/strips.h). */
typedef void kt_adding_stream_fn(const kt_weight *w, int64_t strip, const uint8_t *x,
                                 int64_t stride, int64_t tokens, kt_beside *beside, float *out);

/* The cell of a format beside its best product for the level in use, or NULL, and from how many
 * tokens on it is faster than that product alone. */
kt_stream_fn *kt_format_stream(const kt_weight_format *format);
int64_t kt_least_streamed(const kt_layout *layout);

/* Products of BF16 rows with weights rounded to bf16, where AMX takes less time for them than for
 * integers whose groups have scales: what fine-tuning with LoRA multiplies with. */
typedef struct kt_rounded {
  kt_stream_fn *stream;
  int64_t most; /* columns of a group: of more, integers take no longer */
} kt_rounded;

/* The cell of a layout for the level in use, or NULL. */
const kt_rounded *kt_rounded_best(const kt_layout *layout);

/* From how many tokens on AMX is faster than AVX-512. */
int64_t kt_least_tokens(const kt_layout *layout);

/* kt_product_fn of a streamed product: each strip, and while it is multiplied the next is fetched.
 */
void kt_streamed_product(kt_stream_fn *stream, const kt_weight *w, int64_t strip, int64_t strips,
                         const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                         uint8_t *panel);

/* Where strips strip .. strip + strips - 1 lie, codes and scales: up to `most` runs, neighbours
 * being one. Returns their number. */
typedef struct kt_region {
  const uint8_t *from;
  int64_t size; /* bytes */
} kt_region;
int64_t kt_strip_regions(const kt_weight *w, int64_t strip, int64_t strips, int64_t most,
                         kt_region *regions);

/* Columns column .. column + 31 of w as a strip of BF16 weights: train/strips.h. */
typedef void kt_transpose_fn(const kt_weight *w, int64_t column, uint8_t *strip);

/* The next strip of a product with columns of w: train/transposed.h. */
typedef struct kt_transposed kt_transposed;
typedef void kt_transposed_fn(kt_transposed *transposed, float *out);

/* Of one row or number, what the scalar cells above multiply and transpose (gemm/bf16_gemm.h,
 * group_gemm.h): row n with its scales, exact in binary64; the codes of row n, without what is
 * added to them where they are stored; (row n, column k) as a strip has it, bf16 bits. */
typedef void kt_decode_row_fn(const kt_weight *w, int64_t n, double *out);
typedef void kt_group_codes_fn(const kt_weight *w, int64_t n, int8_t *codes);
typedef uint16_t kt_number_fn(const kt_weight *w, int64_t n, int64_t k);

/* The best cell of a format for the level in use. */
kt_product_fn *kt_format_product(const kt_weight_format *format);

/* ---- Activation rows (rows.c) --------------------------------------------
 *
 * Row layouts; codes are padded with zeros to a multiple of 64 bytes, then follows
 *   INT8   float scale, int32 sum of the codes, 56 unused bytes
 *   GROUP  float scale[groups], int32 sum[groups], padding to a multiple of 64
 *   BF16   64 unused bytes (so that strides of 4096 do not meet in one cache set) */
size_t kt_rows_codes_size(kt_rows_kind kind, int64_t cols); /* offset of what follows the codes */
size_t kt_rows_stride(kt_rows_kind kind, int64_t cols, int64_t group);

/* One row from binary32 values [cols]. INT8 and GROUP: scale = amax * fl32(1 / 127),
 * code = RNE(x * fl32(1 / scale)), both 0 where scale is 0 or denormal; codes 0 and scale
 * NaN where the row (group) holds a NaN or Inf. Same bits on every level. */
void kt_rows_quantize(kt_rows_kind kind, int64_t cols, int64_t group, const float *x, uint8_t *row);

#endif
