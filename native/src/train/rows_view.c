/* Rows of slots, and their products with matrices of few rows. */
#include "rows_view.h"

#include <string.h>

/* Rows of 4096 bytes would meet in one cache set. */
static int64_t gather_stride(int64_t cols) { return 2 * cols + 64; }

size_t kt_gather_size(int64_t cols) { return KT_CHUNK * (size_t)gather_stride(cols); }

static int64_t row_of(const kt_rows_view *v, int64_t slot) {
  return v->index ? v->index[slot] : slot - v->before;
}

static void drop_row(const kt_rows_view *v, int64_t slot, uint16_t *row) {
  v->adapter->math->drop_bf16(v->drop, v->first_pair + v->pair[slot], v->first_column, v->cols,
                              row);
}

const uint8_t *kt_view_rows(const kt_rows_view *v, int64_t slot, int64_t count, uint8_t *gather,
                            int64_t *stride) {
  const int as_is = !v->drop && (!v->index || kt_in_a_row(v->index + slot, count));
  if (as_is) {
    *stride = v->stride;
    return v->rows + row_of(v, slot) * v->stride;
  }
  *stride = gather_stride(v->cols);
  for (int64_t i = 0; i < count; i++) {
    uint16_t *const row = (uint16_t *)(void *)(gather + i * *stride);
    memcpy(row, v->rows + row_of(v, slot + i) * v->stride, (size_t)v->cols * sizeof *row);
    if (v->drop) drop_row(v, slot + i, row);
  }
  return gather;
}

static void store_block(const kt_narrow *n, const float *out, int64_t strip, int64_t slot,
                        int64_t count) {
  const int64_t first = strip * KT_STRIP, some = kt_smaller(KT_STRIP, n->outputs - first);
  for (int64_t i = 0; i < count; i++)
    memcpy(n->values + (slot - n->values_before + i) * n->value_stride + first, out + i * KT_STRIP,
           (size_t)some * sizeof *out);
}

/* Up to KT_CHUNK slots. */
static void chunk_products(const kt_narrow *n, const kt_lora_worker *w, uint8_t *panel,
                           int64_t slot, int64_t count) {
  int64_t stride;
  const uint8_t *const rows = kt_view_rows(&n->in, slot, count, w->gather, &stride);
  const kt_weight weight = kt_strip_weight(w->strips, 1, n->in.cols);
  const kt_blocks b = kt_blocks_of(0, count, KT_MAX_TOKENS);
  for (int64_t strip = 0; strip * KT_STRIP < n->outputs; strip++) {
    n->make(n, strip, w->strips, w->spare);
    for (int64_t i = 0; i < b.number; i++) {
      const int64_t first = kt_block_start(&b, i), some = kt_block_start(&b, i + 1) - first;
      n->in.adapter->product(&weight, 0, 1, rows + first * stride, stride, some, w->out, panel);
      store_block(n, w->out, strip, slot + first, some);
    }
  }
}

void kt_narrow_products(const kt_narrow *n, const kt_lora_worker *w, uint8_t *panel, int64_t slot,
                        int64_t count) {
  const kt_blocks b = kt_blocks_of(slot, count, KT_CHUNK);
  for (int64_t i = 0; i < b.number; i++) {
    const int64_t first = kt_block_start(&b, i);
    chunk_products(n, w, panel, first, kt_block_start(&b, i + 1) - first);
  }
}
