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

/* ---- 3: rows of dy ------------------------------------------------------------ */

static kt_weight down_of(const kt_back *b, int64_t part, int64_t active) {
  return kt_down_weight(&b->run, kt_back_expert(b, part, b->run.route.active[active]));
}

static kt_weight gate_of(const kt_back *b, int64_t part, int64_t active) {
  return kt_gate_weight(&b->run, kt_back_expert(b, part, b->run.route.active[active]));
}

static kt_weight up_of(const kt_back *b, int64_t part, int64_t active) {
  return kt_up_weight(&b->run, kt_back_expert(b, part, b->run.route.active[active]));
}

/* A row of n numbers times `fold`, split. */
static void split_row(const kt_back *b, const uint8_t *row, const float *fold, int64_t n,
                      uint8_t *out) {
  *kt_split_scale(out, n) = b->adapter.strips->split((const uint16_t *)(const void *)row, fold, n,
                                                     (int8_t *)out, (int8_t *)out + n);
}

static void dy_row(const kt_back *b, const float *fold, const uint8_t *row, uint8_t *out) {
  const int64_t hidden = b->run.moe->hidden;
  const uint16_t *const numbers = (const uint16_t *)(const void *)row;
  if (b->folding == KT_FOLD_SPLIT)
    split_row(b, row, fold, hidden, out);
  else if (b->folding == KT_FOLD_ROWS)
    b->adapter.strips->fold(numbers, fold, hidden, (uint16_t *)(void *)out);
  else
    memcpy(out, row, 2 * (size_t)hidden);
}

static int folds_rows(const kt_back *b) {
  return b->folding == KT_FOLD_ROWS || b->folding == KT_FOLD_SPLIT;
}

/* The block of a group that has its slot number i. */
static const kt_back_block *block_of(const kt_back *b, const kt_back_group *g, int64_t i) {
  const kt_back_block *block = b->blocks + g->first;
  while (g->slot + i >= block->slot + block->count) block++;
  return block;
}

void kt_back_rows(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                  const kt_back_group *g, int64_t part, int64_t first, int64_t count) {
  const int64_t stride = kt_folded_stride(b->run.moe->hidden);
  int64_t active = -1;
  for (int64_t i = first; i < first + count; i++) {
    const kt_back_block *const block = block_of(b, g, i);
    if (folds_rows(b) && block->active != active) {
      const kt_weight down = down_of(b, part, block->active);
      kt_fold_scales(&down, 0, w->fold);
    }
    active = block->active;
    const int64_t token = b->run.route.token[g->slot + i];
    dy_row(b, w->fold, b->dy_rows + token * b->h_stride, t->dy + i * stride);
  }
}

/* ---- Products with columns of weights, where a level has them -------------------- */

/* Strips one after the other. Sums over many rows of w are added up part by part, so that the
 * activations of a part stay in L2: for some strips the first parts, then strip by strip the last.
 */
typedef struct columns {
  kt_transposed all, now; /* all: of which the other is a part */
  int64_t parts;
} columns;

static columns columns_of(const kt_back_worker *w, const uint8_t *rows, int64_t stride,
                          int64_t count, int64_t first, int64_t last) {
  return (columns){.all = {.column = first * KT_STRIP,
                           .end = last * KT_STRIP,
                           .rows = rows,
                           .stride = stride,
                           .tokens = count,
                           .ring = w->ring,
                           .sums = w->sums,
                           .squares = w->squares}};
}

static void of_weights(columns *c, const kt_weight *first, const kt_weight *second) {
  c->all.w[0] = *first, c->all.matrices = 1 + (second != NULL);
  if (second) c->all.w[1] = *second;
  c->parts = kt_ceil_div(c->all.matrices * first->rows, KT_TRANSPOSED_SUM);
}

/* Part number i of the sums of columns column .. end - 1. */
static void start_part(columns *c, int64_t column, int64_t end, int64_t i) {
  enum { STEP = 64 };
  const int64_t rows = c->all.matrices * c->all.w[0].rows, last = i + 1 == c->parts;
  c->now = c->all;
  c->now.column = column, c->now.end = end;
  c->now.from = rows * i / c->parts / STEP * STEP;
  c->now.to = last ? rows : rows * (i + 1) / c->parts / STEP * STEP;
  c->now.adds = i > 0;
}

/* The sums of the strip from `column` on. */
static float *next_strip(const kt_back *b, const kt_back_worker *w, columns *c, int64_t column) {
  const int64_t all = c->all.end - c->all.column;
  const int64_t together = c->parts > 1 ? KT_BACK_SUMS * KT_STRIP : all;
  const int64_t at = (column - c->all.column) % together;
  const int64_t end = kt_smaller(c->all.end, column + together);
  for (int64_t i = 0; at == 0 && i < c->parts; i++) {
    start_part(c, column, end, i);
    for (int64_t k = column; i + 1 < c->parts && k < end; k += KT_STRIP)
      b->transposed(&c->now, w->base + (k - column) * KT_TRANSPOSED_ROWS);
  }
  float *const sums = w->base + (c->parts > 1 ? at : 0) * KT_TRANSPOSED_ROWS;
  b->transposed(&c->now, sums);
  return sums;
}

/* ---- 4: through down and the function ---------------------------------------- */

/* Some strips of the middle, of a block. */
typedef struct middle_item {
  const kt_back *b;
  const kt_back_team *t;
  const kt_back_worker *w;
  kt_weight down, gate, up;
  int64_t part, expert, column;
  int64_t slot, before; /* the first of the block; of the group */
  columns columns;
  float *sums;       /* of the strip */
  const float *base; /* of some of its slots */
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
  return rows ? (uint16_t *)(void *)(rows + (m->slot - m->before) * b->w_stride) + m->column : NULL;
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
      .gate = gated ? kt_saved_gate(&b->saved, m->part, at, m->column) : NULL,
      .up = kt_saved_up(&b->saved, m->part, at, m->column, width),
      .weight = b->run.route.weight + m->slot,
      .codes = codes ? kt_saved_codes(&b->saved, m->part, at, width) + m->column : NULL,
      .code_scale = codes ? kt_saved_scale(&b->saved, m->part, at) + group : NULL,
      .tokens = count,
      .saved_stride = KT_STRIP,
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
    const int64_t row = (m->slot - m->before + i) * b->w_stride + 2 * m->column;
    if (gated) __builtin_prefetch(kt_saved_gate(&b->saved, m->part, at + i, m->column), 0, 2);
    __builtin_prefetch(kt_saved_up(&b->saved, m->part, at + i, m->column, width), 0, 2);
    if (codes)
      __builtin_prefetch(kt_saved_codes(&b->saved, m->part, at + i, width) + m->column, 0, 2);
    if (gated) __builtin_prefetch(t->d_gate + row, 1, 2);
    __builtin_prefetch(t->d_up + row, 1, 2);
    if (t->middle) __builtin_prefetch(t->middle + row, 1, 2);
    if (folded && gated) __builtin_prefetch(t->folded_gate + row, 1, 2);
    if (folded) __builtin_prefetch(t->folded_up + row, 1, 2);
  }
}

/* Products of one strip of a matrix with rows of a block, into w->base or added to it. */
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

/* One strip for the slots of a block, whose rows are given. */
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
    m->sums = next_strip(b, m->w, &m->columns, m->column);
  } else {
    b->transpose(&m->down, m->column, m->w->lora.strips);
    strip_products(m->w, b->adapter.product, m->w->lora.strips, b->run.moe->hidden, rows, stride,
                   count);
  }
  const kt_blocks blocks = kt_blocks_of(0, count, KT_MAX_TOKENS);
  for (int64_t i = 0; i < blocks.number; i++) {
    const int64_t first = kt_block_start(&blocks, i);
    const int64_t some = kt_block_start(&blocks, i + 1) - first;
    m->slot = slot + first, m->base = m->sums + first * KT_STRIP;
    if (lora) add_down_lora(m, some);
    through_function(m, some);
  }
}

static void fold_rows_of(const middle_item *m) {
  if (m->b->folding != KT_FOLD_ROWS || m->t->folded_up == m->t->d_up) return;
  if (kt_has_gate(m->b->run.moe->activation.function)) kt_fold_scales(&m->gate, 0, m->w->fold_gate);
  kt_fold_scales(&m->up, 0, m->w->fold_up);
}

/* Strips first .. last - 1 of a block. */
static void block_middle(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                         const kt_back_group *g, int64_t part, const kt_back_block *block,
                         int64_t first, int64_t last) {
  const int64_t hidden = b->run.moe->hidden, stride = kt_folded_stride(hidden);
  const uint8_t *const rows = t->dy + (block->slot - g->slot) * stride;
  const int groups = b->folding == KT_FOLD_GROUPS;
  middle_item m = {.b = b,
                   .t = t,
                   .w = w,
                   .down = down_of(b, part, block->active),
                   .gate = gate_of(b, part, block->active),
                   .up = up_of(b, part, block->active),
                   .part = part,
                   .expert = b->run.route.active[block->active],
                   .sums = w->base,
                   .before = g->slot};
  fold_rows_of(&m);
  m.columns = columns_of(w, rows, stride, block->count, first, last);
  of_weights(&m.columns, &m.down, NULL);
  for (m.column = first * KT_STRIP; m.column < last * KT_STRIP; m.column += KT_STRIP) {
    if (new_group(b, m.column, first * KT_STRIP)) {
      kt_fold_scales(&m.down, m.column, w->fold);
      fold_rows(b, w->fold, rows, stride, hidden, block->count, w->folded_up);
    }
    middle_strip(&m, groups ? w->folded_up : rows, stride, block->slot, block->count);
  }
}

void kt_back_middle(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                    const kt_back_group *g, int64_t part, int64_t first, int64_t count) {
  const int64_t all = b->run.width / KT_STRIP, end = first + count;
  for (int64_t i = first, strips; i < end; i += strips) {
    strips = kt_smaller(end - i, all - i % all);
    block_middle(b, t, w, g, part, b->blocks + g->first + i / all, i % all, i % all + strips);
  }
}

/* ---- 5: B^T of the gradients of gate and up ----------------------------------- */

static void make_inner_b(const kt_narrow *n, int64_t strip, uint8_t *out, uint8_t *spare) {
  (void)spare;
  const kt_plain m = kt_lora_b(n->in.adapter, n->projection, n->expert);
  n->in.adapter->strips->columns(&m, strip * KT_STRIP, -n->part * n->width, n->width, out);
}

/* Rows [gate | up]; zeros for the one that has no LoRA. */
void kt_back_pairs(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                   const kt_back_group *g, int64_t part, int64_t item) {
  const kt_back_block *const block = b->blocks + g->first + item;
  const int64_t slot = block->slot, count = block->count;
  const int64_t rank = b->adapter.rank, cols = b->adapter.pair_cols;
  float *const values = b->v_pair + part * b->slots * 2 * rank;
  memset(values + slot * 2 * rank, 0, (size_t)(count * 2 * rank) * sizeof *values);
  for (kt_projection p = KT_GATE; p <= KT_UP; p++) {
    if (!kt_adapts(&b->adapter, p)) continue;
    kt_narrow n = {
        .in = kt_back_view(b, p == KT_GATE ? t->d_gate : t->d_up, b->w_stride, b->run.width, NULL),
        .make = make_inner_b,
        .projection = p,
        .expert = b->run.route.active[block->active],
        .part = part,
        .width = b->run.width,
        .outputs = rank,
        .values = values + (p == KT_UP ? rank : 0),
        .value_stride = 2 * rank};
    n.in.before = g->slot;
    kt_narrow_products(&n, &w->lora, w->panel, slot, count);
  }
  for (int64_t i = slot; i < slot + count; i++)
    kt_scaled_row(values + i * 2 * rank, 2 * rank, b->adapter.factor, cols,
                  t->pairs + (i - g->slot) * cols);
}

/* Rows [gate | up], split for the products to come. */
void kt_back_split(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                   const kt_back_group *g, int64_t part, int64_t first, int64_t count) {
  const int64_t width = b->run.width;
  const int64_t before = kt_has_gate(b->run.moe->activation.function) ? width : 0;
  int64_t active = -1;
  for (int64_t i = first; i < first + count; i++) {
    const kt_back_block *const block = block_of(b, g, i);
    if (block->active != active) {
      const kt_weight gate = gate_of(b, part, block->active), up = up_of(b, part, block->active);
      if (before) kt_fold_scales(&gate, 0, w->fold);
      kt_fold_scales(&up, 0, w->fold + before);
    }
    active = block->active;
    split_row(b, t->d_gate + i * b->w_stride, w->fold, before + width, t->split + i * b->w_stride);
  }
}

/* ---- 6: through gate and up to x ------------------------------------------------ */

/* An expert's gate and up in a part, a block of its slots, and their rows of gradients. */
typedef struct input_item {
  const kt_back *b;
  const kt_back_team *t;
  const kt_back_worker *w;
  kt_weight gate, up;
  int64_t part, expert, slot, count, stride;
  int64_t before; /* the first slot of the group */
  const uint8_t *gate_rows, *up_rows;
  columns columns;
  float *sums; /* of the strip */
} input_item;

/* Slots from number `at` of the block on. */
static void add_x_lora(const input_item *m, int64_t column, int64_t at, int64_t count, float *to) {
  const kt_back *const b = m->b;
  const kt_back_worker *const w = m->w;
  const kt_adapter *const a = &b->adapter;
  const int64_t stride = kt_pair_stride(a), slot = m->slot + at;
  const kt_weight lora = kt_strip_weight(w->small, 1, a->pair_cols);
  const uint8_t *const rows = (const uint8_t *)m->t->pairs + (slot - m->before) * stride;
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

static void add_to_tokens(const input_item *m, int64_t column) {
  const kt_back *const b = m->b;
  const kt_weighted sums = {.down = kt_sums_of(m->sums, m->count),
                            .strips = 1,
                            .weight = m->w->ones,
                            .token = b->run.route.token + m->slot,
                            .fresh = b->run.route.fresh + m->slot,
                            .y = b->parts[m->part].partial + column,
                            .stride = b->run.moe->hidden};
  b->epilogue->add_weighted(&sums, 0, m->count);
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

/* The strip of columns from `column` on, for the slots of the block. */
static void input_strip(input_item *m, int64_t column) {
  const kt_back *const b = m->b;
  const kt_back_worker *const w = m->w;
  const int lora = kt_adapts_x(&b->adapter);
  if (lora) kt_pair_a_columns(&b->adapter, m->expert, column / KT_STRIP, w->small, w->lora.spare);
  if (b->transposed)
    m->sums = next_strip(b, w, &m->columns, column);
  else
    input_products(m, column);
  const kt_blocks blocks = kt_blocks_of(0, m->count, KT_MAX_TOKENS);
  for (int64_t i = 0; lora && i < blocks.number; i++) {
    const int64_t at = kt_block_start(&blocks, i);
    add_x_lora(m, column, at, kt_block_start(&blocks, i + 1) - at, m->sums + at * KT_STRIP);
  }
  add_to_tokens(m, column);
}

/* Rows of the item with the scales of the group of `column`. */
static void fold_input(input_item *m, int64_t column) {
  const kt_back *const b = m->b;
  const kt_back_worker *const w = m->w;
  const int64_t width = b->run.width, at = (m->slot - m->before) * b->w_stride;
  m->stride = kt_folded_stride(width);
  kt_fold_scales(&m->up, column, w->fold_up);
  m->up_rows =
      fold_rows(b, w->fold_up, m->t->d_up + at, b->w_stride, width, m->count, w->folded_up);
  if (!m->gate_rows) return;
  kt_fold_scales(&m->gate, column, w->fold_gate);
  m->gate_rows =
      fold_rows(b, w->fold_gate, m->t->d_gate + at, b->w_stride, width, m->count, w->folded_gate);
}

/* Products of the item's rows [gate | up]. */
static columns input_columns(const input_item *m, int64_t first, int64_t last) {
  const kt_back *const b = m->b;
  const uint8_t *const rows = b->folding == KT_FOLD_SPLIT ? m->t->split : m->t->folded_gate;
  columns c =
      columns_of(m->w, rows + (m->slot - m->before) * m->stride, m->stride, m->count, first, last);
  of_weights(&c, m->gate_rows ? &m->gate : &m->up, m->gate_rows ? &m->up : NULL);
  return c;
}

/* Strips first .. last - 1 of a block. */
static void block_inputs(input_item *m, int64_t first, int64_t last) {
  const kt_back *const b = m->b;
  const int gated = kt_has_gate(b->run.moe->activation.function);
  const int64_t at = (m->slot - m->before) * b->w_stride;
  m->stride = b->w_stride;
  m->gate_rows = gated ? m->t->folded_gate + at : NULL;
  m->up_rows = m->t->folded_up + at;
  m->sums = m->w->base;
  if (b->transposed) m->columns = input_columns(m, first, last);
  for (int64_t column = first * KT_STRIP; column < last * KT_STRIP; column += KT_STRIP) {
    if (new_group(b, column, first * KT_STRIP)) fold_input(m, column);
    input_strip(m, column);
  }
}

void kt_back_inputs(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                    const kt_back_group *g, int64_t part, int64_t first, int64_t count) {
  for (const kt_back_block *i = b->blocks + g->first; i < b->blocks + g->end; i++) {
    input_item m = {.b = b,
                    .t = t,
                    .w = w,
                    .gate = gate_of(b, part, i->active),
                    .up = up_of(b, part, i->active),
                    .part = part,
                    .expert = b->run.route.active[i->active],
                    .slot = i->slot,
                    .count = i->count,
                    .before = g->slot};
    block_inputs(&m, first, first + count);
  }
}

/* ---- 7: gradients of routing weights ---------------------------------------------- */

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
