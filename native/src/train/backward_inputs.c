/* Gradients of activations: through down, the function, gate and up, to x. */
#include "../gemm/bf16_gemm.h"
#include "backward.h"

#include <string.h>

kt_rows_view kt_back_view(const kt_back *b, const uint8_t *rows, int64_t stride, int64_t cols,
                          const int32_t *index) {
  return (kt_rows_view){.rows = rows,
                        .stride = stride,
                        .cols = cols,
                        .index = index,
                        .pair = b->run.route.pair,
                        .first_pair = kt_back_first_slot(b),
                        .adapter = &b->adapter};
}

/* ---- 2: B^T dy of down ------------------------------------------------------ */

static void make_down_b(const kt_narrow *n, int64_t strip, uint8_t *out, uint8_t *spare) {
  (void)spare;
  const kt_plain m = kt_lora_b(n->in.adapter, KT_DOWN, n->expert);
  n->in.adapter->strips->columns(&m, strip * KT_STRIP, 0, n->in.cols, out);
}

void kt_back_down_products(const kt_back *b, const kt_back_worker *w, int64_t active) {
  const kt_route *const route = &b->run.route;
  const int64_t slot = route->start[active], count = route->start[active + 1] - slot;
  const int64_t rank = b->adapter.rank, cols = b->adapter.cols;
  const kt_narrow n = {
      .in = kt_back_view(b, b->dy_rows, b->h_stride, b->run.moe->hidden, route->token),
      .make = make_down_b,
      .expert = route->active[active],
      .outputs = rank,
      .values = b->v_down,
      .value_stride = rank};
  kt_narrow_products(&n, &w->lora, w->panel, slot, count);
  for (int64_t i = slot; i < slot + count; i++)
    kt_scaled_row(b->v_down + i * rank, rank, b->adapter.factor, cols, b->down_rows + i * cols);
}

/* Slots that are multiplied at a time. With AMX, rows of `cols` numbers are read from L2 for every
 * strip (7168 x 2048, INT8, products with down's columns: 128 slots 810 GFLOPS, 192 620). */
static int64_t most_slots(const kt_back *b, int64_t cols) {
  enum { IN_L2 = 15 << 17 }; /* 1.9 MB of 2 */
  if (!b->transposed) return KT_CHUNK;
  return kt_larger(32, kt_smaller(KT_CHUNK, IN_L2 / (2 * cols)));
}

/* ---- 3: through down and the function ---------------------------------------- */

/* One item: some strips of an expert's middle. */
typedef struct middle_item {
  const kt_back *b;
  const kt_back_team *t;
  const kt_back_worker *w;
  kt_weight down, gate, up;
  int64_t part, expert, slot, column; /* slot: the block's first */
  kt_transposed product;
  const float *base; /* of the block */
} middle_item;

/* Whether a strip has other scales than the one before it: those of a new group, or the first. */
static int new_group(const kt_back *b, int64_t column, int64_t first) {
  if (b->folding != KT_FOLD_GROUPS) return 0;
  return column == first || column % b->run.moe->layout.group == 0;
}

/* Rows times scales, into `out`. */
static const uint8_t *fold_rows(const kt_back *b, const float *fold, const uint8_t *rows,
                                int64_t stride, int64_t cols, int64_t count, uint8_t *out) {
  for (int64_t i = 0; i < count; i++)
    b->adapter.strips->fold((const uint16_t *)(const void *)(rows + i * stride), fold, cols,
                            (uint16_t *)(void *)(out + i * kt_folded_stride(cols)));
  return out;
}

/* The gradient of what A of down has read, into w->added. */
static void add_down_lora(const middle_item *m, int64_t count) {
  const kt_back *const b = m->b;
  const kt_adapter *const a = &b->adapter;
  const int64_t stride = kt_down_stride(a), column = m->part * b->run.width + m->column;
  const kt_weight lora = kt_strip_weight(m->w->small, 1, a->cols);
  a->product(&lora, 0, 1, (const uint8_t *)b->down_rows + m->slot * stride, stride, count,
             m->w->added, m->w->panel);
  for (int64_t i = 0; a->drop_middle.below && i < count; i++)
    a->math->drop_f32(&a->drop_middle, kt_back_first_slot(b) + b->run.route.pair[m->slot + i],
                      column, KT_STRIP, m->w->added + i * KT_STRIP);
}

static uint16_t *row_at(const kt_back *b, uint8_t *rows, const middle_item *m) {
  return rows ? (uint16_t *)(void *)(rows + m->slot * b->w_stride) + m->column : NULL;
}

/* Gradients of gate and up with the scales of their rows. */
static void fold_block(const middle_item *m, const float *fold, uint8_t *rows, uint8_t *folded,
                       int64_t count) {
  const int64_t step = m->b->w_stride / 2;
  const uint16_t *const from = row_at(m->b, rows, m);
  uint16_t *const to = row_at(m->b, folded, m);
  for (int64_t i = 0; i < count; i++)
    m->b->adapter.strips->fold(from + i * step, fold + m->column, KT_STRIP, to + i * step);
}

static void through_function(const middle_item *m, int64_t count) {
  const kt_back *const b = m->b;
  const int64_t at = kt_back_first_slot(b) + m->slot, width = b->run.width;
  const int gated = kt_has_gate(b->run.moe->activation.function), codes = b->saved.groups != 0;
  const int64_t group = b->saved.groups > 1 ? m->column / b->run.moe->layout.group : 0;
  const int64_t strips = width / KT_STRIP, strip = m->part * strips + m->column / KT_STRIP;
  const kt_inner_back back = {
      .base = m->base,
      .lora = kt_adapts(&b->adapter, KT_DOWN) ? m->w->added : NULL,
      .gate = gated ? kt_saved_gate(&b->saved, m->part, at) + m->column : NULL,
      .up = kt_saved_up(&b->saved, m->part, at, width) + m->column,
      .weight = b->run.route.weight + m->slot,
      .codes = codes ? kt_saved_codes(&b->saved, m->part, at, width) + m->column : NULL,
      .code_scale = codes ? kt_saved_scale(&b->saved, m->part, at) + group : NULL,
      .tokens = count,
      .saved_stride = b->saved.inner_cols,
      .code_stride = width,
      .code_scale_stride = b->saved.groups,
      .stride = b->w_stride / 2,
      .d_gate = gated ? row_at(b, m->t->d_gate, m) : NULL,
      .d_up = row_at(b, m->t->d_up, m),
      .middle = row_at(b, m->t->middle, m),
      .dot = b->dot + strip * b->slots + m->slot,
  };
  b->activate(&b->run.moe->activation, &back);
  if (b->folding != KT_FOLD_ROWS || m->t->folded_up == m->t->d_up) return;
  if (gated) fold_block(m, m->w->fold_gate, m->t->d_gate, m->t->folded_gate, count);
  fold_block(m, m->w->fold_up, m->t->d_up, m->t->folded_up, count);
}

/* What the function reads and writes of `count` slots: a line of each of their rows, fetched while
 * a product is computed. A line of codes has two strips. */
static void prefetch_function(const middle_item *m, int64_t count) {
  const kt_back *const b = m->b;
  const kt_back_team *const t = m->t;
  const int64_t at = kt_back_first_slot(b) + m->slot, width = b->run.width;
  const int gated = kt_has_gate(b->run.moe->activation.function);
  const int codes = b->saved.groups && m->column % (2 * KT_STRIP) == 0;
  const int folded = t->folded_up != t->d_up;
  for (int64_t i = 0; i < count; i++) {
    const int64_t row = (m->slot + i) * b->w_stride + 2 * m->column;
    if (gated) __builtin_prefetch(kt_saved_gate(&b->saved, m->part, at + i) + m->column, 0, 2);
    __builtin_prefetch(kt_saved_up(&b->saved, m->part, at + i, width) + m->column, 0, 2);
    if (codes)
      __builtin_prefetch(kt_saved_codes(&b->saved, m->part, at + i, width) + m->column, 0, 2);
    if (gated) __builtin_prefetch(t->d_gate + row, 1, 2);
    __builtin_prefetch(t->d_up + row, 1, 2);
    if (t->middle) __builtin_prefetch(t->middle + row, 1, 2);
    if (folded && gated) __builtin_prefetch(t->folded_gate + row, 1, 2);
    if (folded) __builtin_prefetch(t->folded_up + row, 1, 2);
  }
}

/* Products of one strip of a matrix with rows of a chunk, into w->base or added to it. */
static void strip_products(const kt_back_worker *w, kt_product_fn *product, const uint8_t *codes,
                           int64_t cols, const uint8_t *rows, int64_t stride, int64_t count) {
  const kt_weight strip = kt_strip_weight(codes, 1, cols);
  const kt_blocks blocks = kt_blocks_of(0, count, KT_MAX_TOKENS);
  for (int64_t i = 0; i < blocks.number; i++) {
    const int64_t first = kt_block_start(&blocks, i);
    product(&strip, 0, 1, rows + first * stride, stride, kt_block_start(&blocks, i + 1) - first,
            w->base + first * KT_STRIP, w->panel);
  }
}

/* One strip for the slots of a chunk, whose rows are given. */
static void middle_strip(middle_item *m, const uint8_t *rows, int64_t stride, int64_t slot,
                         int64_t count) {
  const kt_back *const b = m->b;
  const int lora = kt_adapts(&b->adapter, KT_DOWN);
  if (lora) {
    const kt_plain a = kt_lora_a(&b->adapter, KT_DOWN, m->expert);
    b->adapter.strips->columns(&a, m->part * b->run.width + m->column, 0, b->adapter.cols,
                               m->w->small);
  }
  m->slot = slot;
  prefetch_function(m, count);
  if (b->transposed) {
    b->transposed(&m->product, m->w->base);
  } else {
    b->transpose(&m->down, m->column, m->w->lora.strips);
    strip_products(m->w, b->adapter.product, m->w->lora.strips, b->run.moe->hidden, rows, stride,
                   count);
  }
  const kt_blocks blocks = kt_blocks_of(0, count, KT_MAX_TOKENS);
  for (int64_t i = 0; i < blocks.number; i++) {
    const int64_t first = kt_block_start(&blocks, i);
    const int64_t some = kt_block_start(&blocks, i + 1) - first;
    m->slot = slot + first, m->base = m->w->base + first * KT_STRIP;
    if (lora) add_down_lora(m, some);
    through_function(m, some);
  }
}

static void fold_rows_of(const middle_item *m) {
  if (m->b->folding != KT_FOLD_ROWS && m->b->folding != KT_FOLD_SPLIT) return;
  kt_fold_scales(&m->down, 0, m->w->fold);
  if (m->t->folded_up == m->t->d_up) return;
  if (kt_has_gate(m->b->run.moe->activation.function)) kt_fold_scales(&m->gate, 0, m->w->fold_gate);
  kt_fold_scales(&m->up, 0, m->w->fold_up);
}

/* A row of n numbers times `fold`, split. */
static void split_row(const kt_back *b, const uint8_t *row, const float *fold, int64_t n,
                      uint8_t *out) {
  *kt_split_scale(out, n) = b->adapter.strips->split((const uint16_t *)(const void *)row, fold, n,
                                                     (int8_t *)out, (int8_t *)out + n);
}

/* Rows of dy of a chunk as products want them. */
static const uint8_t *dy_rows(const middle_item *m, const kt_rows_view *dy, int64_t slot,
                              int64_t count, int64_t *stride) {
  if (m->b->folding != KT_FOLD_SPLIT)
    return kt_view_rows(dy, slot, count, m->w->lora.gather, stride);
  *stride = kt_folded_stride(dy->cols);
  for (int64_t i = 0; i < count; i++)
    split_row(m->b, dy->rows + dy->index[slot + i] * dy->stride, m->w->fold, dy->cols,
              m->w->lora.gather + i * *stride);
  return m->w->lora.gather;
}

/* A product of a chunk's rows with columns first .. end - 1 of w. */
static kt_transposed transposed_of(const kt_back_worker *w, const uint8_t *rows, int64_t stride,
                                   int64_t count, int64_t first, int64_t end) {
  return (kt_transposed){.column = first,
                         .end = end,
                         .rows = rows,
                         .stride = stride,
                         .tokens = count,
                         .ring = w->ring,
                         .sums = w->sums,
                         .squares = w->squares};
}

void kt_back_middle(const kt_back *b, const kt_back_team *t, const kt_back_worker *w, int64_t part,
                    int64_t item) {
  const kt_run *const r = &b->run;
  const int64_t all = r->width / KT_STRIP, items = kt_ceil_div(all, b->middle_strips);
  const int64_t active = item / items, first = item % items * b->middle_strips;
  const int64_t last = kt_smaller(first + b->middle_strips, all);
  const kt_expert *e = kt_back_expert(b, part, r->route.active[active]);
  middle_item m = {.b = b,
                   .t = t,
                   .w = w,
                   .down = {e->down, e->down_scale, r->moe->hidden, r->width, r->moe->layout},
                   .gate = {e->gate, e->gate_scale, r->width, r->moe->hidden, r->moe->layout},
                   .up = {e->up, e->up_scale, r->width, r->moe->hidden, r->moe->layout},
                   .part = part,
                   .expert = r->route.active[active]};
  kt_rows_view dy = kt_back_view(b, b->dy_rows, b->h_stride, r->moe->hidden, r->route.token);
  fold_rows_of(&m);
  if (b->folding == KT_FOLD_ROWS) dy.fold = w->fold;
  const kt_blocks chunks = kt_expert_blocks(&r->route, active, most_slots(b, r->moe->hidden));
  for (int64_t i = 0; i < chunks.number; i++) {
    const int64_t slot = kt_block_start(&chunks, i);
    const int64_t count = kt_block_start(&chunks, i + 1) - slot;
    int64_t stride;
    const uint8_t *const rows = dy_rows(&m, &dy, slot, count, &stride);
    m.product = transposed_of(w, rows, stride, count, first * KT_STRIP, last * KT_STRIP);
    m.product.w[0] = m.down, m.product.matrices = 1;
    const int groups = b->folding == KT_FOLD_GROUPS;
    for (m.column = first * KT_STRIP; m.column < last * KT_STRIP; m.column += KT_STRIP) {
      if (new_group(b, m.column, first * KT_STRIP)) {
        kt_fold_scales(&m.down, m.column, w->fold);
        fold_rows(b, w->fold, rows, stride, r->moe->hidden, count, w->folded_up);
      }
      middle_strip(&m, groups ? w->folded_up : rows,
                   groups ? kt_folded_stride(r->moe->hidden) : stride, slot, count);
    }
  }
}

/* ---- 4: B^T of the gradients of gate and up ----------------------------------- */

static void make_inner_b(const kt_narrow *n, int64_t strip, uint8_t *out, uint8_t *spare) {
  (void)spare;
  const kt_plain m = kt_lora_b(n->in.adapter, n->projection, n->expert);
  n->in.adapter->strips->columns(&m, strip * KT_STRIP, -n->part * n->width, n->width, out);
}

/* Rows [gate | up]; zeros for the one that has no LoRA. */
void kt_back_pairs(const kt_back *b, const kt_back_team *t, const kt_back_worker *w, int64_t part,
                   int64_t active) {
  const kt_route *const route = &b->run.route;
  const int64_t slot = route->start[active], count = route->start[active + 1] - slot;
  const int64_t rank = b->adapter.rank, cols = b->adapter.pair_cols;
  float *const values = b->v_pair + part * b->slots * 2 * rank;
  memset(values + slot * 2 * rank, 0, (size_t)(count * 2 * rank) * sizeof *values);
  for (kt_projection p = KT_GATE; p <= KT_UP; p++) {
    if (!kt_adapts(&b->adapter, p)) continue;
    const kt_narrow n = {
        .in = kt_back_view(b, p == KT_GATE ? t->d_gate : t->d_up, b->w_stride, b->run.width, NULL),
        .make = make_inner_b,
        .projection = p,
        .expert = route->active[active],
        .part = part,
        .width = b->run.width,
        .outputs = rank,
        .values = values + (p == KT_UP ? rank : 0),
        .value_stride = 2 * rank};
    kt_narrow_products(&n, &w->lora, w->panel, slot, count);
  }
  for (int64_t i = slot; i < slot + count; i++)
    kt_scaled_row(values + i * 2 * rank, 2 * rank, b->adapter.factor, cols, t->pairs + i * cols);
}

/* ---- 5: through gate and up to x ------------------------------------------------ */

/* An expert's gate and up in a part, some of its slots, and their rows of gradients. */
typedef struct input_item {
  const kt_back *b;
  const kt_back_team *t;
  const kt_back_worker *w;
  kt_weight gate, up;
  int64_t part, expert, slot, count, stride;
  const uint8_t *gate_rows, *up_rows;
  kt_transposed product;
} input_item;

static void add_x_lora(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                       int64_t column, int64_t slot, int64_t count, float *to) {
  const kt_adapter *const a = &b->adapter;
  const int64_t stride = kt_pair_stride(a);
  const kt_weight lora = kt_strip_weight(w->small, 1, a->pair_cols);
  const uint8_t *const rows = (const uint8_t *)t->pairs + slot * stride;
  if (!a->drop_x.below) {
    a->add(&lora, 0, 1, rows, stride, count, to, w->panel);
    return;
  }
  a->product(&lora, 0, 1, rows, stride, count, w->added, w->panel);
  for (int64_t i = 0; i < count; i++) {
    float *const added = w->added + i * KT_STRIP, *const base = to + i * KT_STRIP;
    a->math->drop_f32(&a->drop_x, kt_back_first_slot(b) + b->run.route.pair[slot + i], column,
                      KT_STRIP, added);
    for (int k = 0; k < KT_STRIP; k++) base[k] += added[k];
  }
}

static void add_to_tokens(const kt_back *b, const float *base, float *partial, int64_t column,
                          int64_t slot, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    b->epilogue->accumulate(1.0f, base + i * KT_STRIP, NULL,
                            partial + b->run.route.token[slot + i] * b->run.moe->hidden + column);
}

/* Products of a strip by strips of up and gate. */
static void input_products(const input_item *m, int64_t column) {
  const kt_back *const b = m->b;
  const int64_t width = b->run.width;
  uint8_t *const strip = m->w->lora.strips;
  b->transpose(&m->up, column, strip);
  strip_products(m->w, b->adapter.product, strip, width, m->up_rows, m->stride, m->count);
  if (!m->gate_rows) return;
  b->transpose(&m->gate, column, strip);
  strip_products(m->w, b->adapter.add, strip, width, m->gate_rows, m->stride, m->count);
}

/* The strip of columns from `column` on, for the slots of the item. */
static void input_strip(input_item *m, int64_t column) {
  const kt_back *const b = m->b;
  const kt_back_worker *const w = m->w;
  const int lora = kt_adapts_x(&b->adapter);
  if (lora) kt_pair_a_columns(&b->adapter, m->expert, column / KT_STRIP, w->small, w->lora.spare);
  if (b->transposed)
    b->transposed(&m->product, w->base);
  else
    input_products(m, column);
  const kt_blocks blocks = kt_blocks_of(0, m->count, KT_MAX_TOKENS);
  for (int64_t i = 0; i < blocks.number; i++) {
    const int64_t at = kt_block_start(&blocks, i), count = kt_block_start(&blocks, i + 1) - at;
    float *const base = w->base + at * KT_STRIP;
    if (lora) add_x_lora(b, m->t, w, column, m->slot + at, count, base);
    add_to_tokens(b, base, b->parts[m->part].partial, column, m->slot + at, count);
  }
}

/* Rows of the item with the scales of the group of `column`. */
static void fold_input(input_item *m, int64_t column) {
  const kt_back *const b = m->b;
  const kt_back_worker *const w = m->w;
  const int64_t width = b->run.width, at = m->slot * b->w_stride;
  m->stride = kt_folded_stride(width);
  kt_fold_scales(&m->up, column, w->fold_up);
  m->up_rows =
      fold_rows(b, w->fold_up, m->t->d_up + at, b->w_stride, width, m->count, w->folded_up);
  if (!m->gate_rows) return;
  kt_fold_scales(&m->gate, column, w->fold_gate);
  m->gate_rows =
      fold_rows(b, w->fold_gate, m->t->d_gate + at, b->w_stride, width, m->count, w->folded_gate);
}

/* The product of the item's rows [gate | up]. */
static void start_product(input_item *m, int64_t first, int64_t last) {
  const kt_back *const b = m->b;
  const uint8_t *const rows = b->folding == KT_FOLD_SPLIT ? m->t->split : m->t->folded_gate;
  m->product = transposed_of(m->w, rows + m->slot * m->stride, m->stride, m->count,
                             first * KT_STRIP, last * KT_STRIP);
  m->product.matrices = m->gate_rows ? 2 : 1;
  m->product.w[0] = m->gate_rows ? m->gate : m->up;
  m->product.w[1] = m->up;
}

/* An expert's strips first .. last - 1. */
static void expert_inputs(input_item *m, int64_t active, int64_t first, int64_t last) {
  const kt_back *const b = m->b;
  const int gated = kt_has_gate(b->run.moe->activation.function);
  const int64_t most = most_slots(b, (1 + gated) * b->run.width);
  const kt_blocks chunks = kt_expert_blocks(&b->run.route, active, most);
  for (int64_t i = 0; i < chunks.number; i++) {
    m->slot = kt_block_start(&chunks, i), m->count = kt_block_start(&chunks, i + 1) - m->slot;
    m->stride = b->w_stride;
    m->gate_rows = gated ? m->t->folded_gate + m->slot * m->stride : NULL;
    m->up_rows = m->t->folded_up + m->slot * m->stride;
    if (b->transposed) start_product(m, first, last);
    for (int64_t column = first * KT_STRIP; column < last * KT_STRIP; column += KT_STRIP) {
      if (new_group(b, column, first * KT_STRIP)) fold_input(m, column);
      input_strip(m, column);
    }
  }
}

/* Rows [gate | up] of an expert, split for the products to come. */
void kt_back_split(const kt_back *b, const kt_back_team *t, const kt_back_worker *w, int64_t part,
                   int64_t active) {
  const kt_run *const r = &b->run;
  const kt_expert *const e = kt_back_expert(b, part, r->route.active[active]);
  const kt_weight gate = {e->gate, e->gate_scale, r->width, r->moe->hidden, r->moe->layout};
  const kt_weight up = {e->up, e->up_scale, r->width, r->moe->hidden, r->moe->layout};
  const int64_t before = kt_has_gate(r->moe->activation.function) ? r->width : 0;
  if (before) kt_fold_scales(&gate, 0, w->fold);
  kt_fold_scales(&up, 0, w->fold + before);
  for (int64_t slot = r->route.start[active]; slot < r->route.start[active + 1]; slot++)
    split_row(b, t->d_gate + slot * b->w_stride, w->fold, before + r->width,
              t->split + slot * b->w_stride);
}

void kt_back_inputs(const kt_back *b, const kt_back_team *t, const kt_back_worker *w, int64_t part,
                    int64_t item) {
  const kt_run *const r = &b->run;
  const int64_t hidden = r->moe->hidden, first = item * b->dx_strips;
  const int64_t last = kt_smaller(first + b->dx_strips, hidden / KT_STRIP);
  float *const partial = b->parts[part].partial;
  for (int64_t token = 0; token < r->tokens; token++)
    memset(partial + token * hidden + first * KT_STRIP, 0,
           (size_t)((last - first) * KT_STRIP) * sizeof *partial);
  for (int64_t active = 0; active < r->route.active_count; active++) {
    const int64_t expert = r->route.active[active];
    const kt_expert *e = kt_back_expert(b, part, expert);
    input_item m = {.b = b,
                    .t = t,
                    .w = w,
                    .gate = {e->gate, e->gate_scale, r->width, hidden, r->moe->layout},
                    .up = {e->up, e->up_scale, r->width, hidden, r->moe->layout},
                    .part = part,
                    .expert = expert};
    expert_inputs(&m, active, first, last);
  }
}

/* ---- 6: gradients of routing weights ---------------------------------------------- */

static double lora_dot(const kt_back *b, int64_t slot) {
  const int64_t rank = b->adapter.rank;
  double sum = 0.0;
  if (!kt_adapts(&b->adapter, KT_DOWN)) return 0.0;
  for (int64_t part = 0; part < b->run.moe->parts; part++) {
    const float *const product =
        kt_saved_product(&b->saved, part, kt_back_first_slot(b) + slot, rank);
    for (int64_t j = 0; j < rank; j++)
      sum += (double)b->v_down[slot * rank + j] * (double)product[j];
  }
  return sum * (double)b->adapter.factor;
}

static double bias_dot(const kt_back *b, int64_t slot, const float *bias) {
  const uint8_t *const row = b->dy_rows + b->run.route.token[slot] * b->h_stride;
  const uint16_t *const dy = (const uint16_t *)(const void *)row;
  double sum = 0.0;
  for (int64_t i = 0; i < b->run.moe->hidden; i++) sum += kt_bf16_value(dy[i]) * (double)bias[i];
  return sum;
}

void kt_back_slot_weight(const kt_back *b, int64_t slot, int64_t expert) {
  const int64_t strips = b->run.moe->parts * (b->run.width / KT_STRIP);
  const float *const bias = kt_back_expert(b, 0, expert)->down_bias;
  double sum = lora_dot(b, slot) + (bias ? bias_dot(b, slot, bias) : 0.0);
  for (int64_t strip = 0; strip < strips; strip++) sum += (double)b->dot[strip * b->slots + slot];
  b->want.dweights[kt_back_first_slot(b) + b->run.route.pair[slot]] = (float)sum;
}
