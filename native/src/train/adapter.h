/* adapter.h - the LoRA matrices of a call, in the forms that products want.
 *
 * Rows of A x hold what gate and up read side by side, [gate | up], so that both A are one matrix
 * of 2 rank rows, and A^T of both one of 2 rank columns. */
#ifndef KT_ADAPTER_H
#define KT_ADAPTER_H

#include "../moe/run.h"
#include "gradients.h"
#include "strips.h"

typedef enum kt_projection { KT_GATE, KT_UP, KT_DOWN } kt_projection;

typedef struct kt_adapter {
  const kt_lora *lora; /* NULL: none, and nothing below has a meaning */
  const kt_moe *moe;
  const kt_strips *strips;
  const kt_gradients *math;
  kt_product_fn *product, *add;    /* of strips; out +=: add */
  kt_adding_stream_fn *add_beside; /* the same between streamed products */
  int64_t rank, pair_cols, cols;   /* columns of rows [gate | up], and of one matrix: whole tiles */
  float factor;                    /* scale / (1 - dropout) */
  kt_drop drop_x, drop_middle;
} kt_adapter;

/* KT_OK, or KT_ERR_ARGUMENT for numbers, dtypes, alignments and pairs that cannot be. lora may be
 * NULL. */
kt_status kt_check_lora(const kt_moe *moe, const kt_lora *lora);
kt_adapter kt_adapter_of(const kt_moe *moe, const kt_lora *lora);

/* What base products read of activations. */
kt_rows_kind kt_rows_of(const kt_moe *moe, const kt_adapter *adapter);

/* Whether the matrix of a projection has LoRA; any that reads x. */
int kt_adapts(const kt_adapter *adapter, kt_projection projection);
int kt_adapts_x(const kt_adapter *adapter);

/* The matrices of an expert: A [rank, inputs], B [outputs, rank]. */
kt_plain kt_lora_a(const kt_adapter *adapter, kt_projection projection, int64_t expert);
kt_plain kt_lora_b(const kt_adapter *adapter, kt_projection projection, int64_t expert);

/* Bytes from one row [gate | up], or of down's, to the next. */
static inline int64_t kt_pair_stride(const kt_adapter *a) { return 2 * a->pair_cols; }
static inline int64_t kt_down_stride(const kt_adapter *a) { return 2 * a->cols; }

/* Strip `strip` of the 2 rank rows of gate's and up's A: its product with x is a part of a row
 * [gate | up]. spare: room for a second strip. */
void kt_pair_a_strip(const kt_adapter *adapter, int64_t expert, int64_t strip, uint8_t *out,
                     uint8_t *spare);

/* Rows 32 * strip ... of [gate's A^T | up's A^T], pair_cols columns. */
void kt_pair_a_columns(const kt_adapter *adapter, int64_t expert, int64_t strip, uint8_t *out,
                       uint8_t *spare);

/* Where B of gate or up finds its columns in a row [gate | up]: behind `offset` bytes, `cols`
 * columns, of which B's begin at `shift`. */
typedef struct kt_pair_side {
  int64_t offset, shift, cols;
} kt_pair_side;
kt_pair_side kt_side_of(const kt_adapter *adapter, kt_projection projection);

/* Strips of B of gate or up, from row `first` on; of down from row `first` on, `cols` columns. */
void kt_b_strips(const kt_adapter *adapter, kt_projection projection, int64_t expert, int64_t first,
                 int64_t strips, uint8_t *out);

/* A strip, or several, as a weight of the product. */
kt_weight kt_strip_weight(const uint8_t *strips, int64_t number, int64_t cols);

/* out = bf16(values * factor), and zeros up to `cols`. */
void kt_scaled_row(const float *values, int64_t count, float factor, int64_t cols, uint16_t *out);

#endif
