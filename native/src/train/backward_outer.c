/* Gradients of matrices: sums over an expert's slots of products of two rows. */
#include "../moe/rows.h"
#include "../simd/bits.h"
#include "backward.h"

#include <string.h>

typedef enum kind {
  GATE_B,
  UP_B,
  DOWN_A,
  GATE,
  UP,
  DOWN, /* of a part; */
  DOWN_B,
  GATE_A,
  UP_A, /* of all */
  KINDS
} kind;

/* The gradient of one expert's matrix, or of a part's columns or rows of it: element (j, c) is the
 * sum over slots of a[slot][j] * view[slot][c], at out[j * row + c * col]. */
typedef struct gradient {
  float *out;
  uint16_t *rounded; /* where the same in bf16 is wanted, or NULL */
  int64_t rows, cols, row, col;
  int64_t before; /* the first slot of the group */
  kt_rows_view view;
} gradient;

static void *wanted(const kt_back *b, kind k) {
  const kt_moe_gradients *w = &b->want;
  void *const all[KINDS] = {[GATE_B] = w->gate_b, [UP_B] = w->up_b,     [DOWN_A] = w->down_a,
                            [GATE] = w->gate,     [UP] = w->up,         [DOWN] = w->down,
                            [DOWN_B] = w->down_b, [GATE_A] = w->gate_a, [UP_A] = w->up_a};
  return all[k];
}

int kt_back_needs_x(const kt_back *b) {
  return wanted(b, GATE_A) || wanted(b, UP_A) || wanted(b, GATE) || wanted(b, UP);
}

int kt_back_needs_middle(const kt_back *b) { return wanted(b, DOWN_A) || wanted(b, DOWN); }

/* Rows and columns of a matrix that one part has, or all parts. */
static int64_t rows_of(const kt_back *b, kind k) {
  if (k == DOWN) return b->run.moe->hidden;
  return k == GATE || k == UP ? b->run.width : b->adapter.rank;
}

static int64_t cols_of(const kt_back *b, kind k) {
  return k == GATE_B || k == UP_B || k == DOWN_A || k == DOWN ? b->run.width : b->run.moe->hidden;
}

static int64_t elements(const kt_back *b, kind k) {
  const int64_t parts = k < DOWN_B ? b->run.moe->parts : 1;
  return rows_of(b, k) * cols_of(b, k) * parts;
}

/* The place of an expert among those that have slots in the batch, or -1. */
static int64_t active_of(const kt_route *route, int64_t expert) {
  int64_t low = 0, high = route->active_count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (route->active[middle] < expert)
      low = middle + 1;
    else
      high = middle;
  }
  return low < route->active_count && route->active[low] == expert ? low : -1;
}

/* ---- In bf16 --------------------------------------------------------------------- */

static int is_of_lora(kind k) { return k != GATE && k != UP && k != DOWN; }

static int is_rounded(const kt_back *b, kind k) {
  return wanted(b, k) && b->want.lora_bf16 && is_of_lora(k);
}

int64_t kt_back_exact_size(const kt_back *b) {
  int64_t size = 0;
  for (kind k = 0; k < KINDS; k++)
    if (is_rounded(b, k)) size += b->run.moe->experts * elements(b, k);
  return size;
}

/* Sums of all experts in binary32, of a kind that is wanted. */
static float *sums_of(const kt_back *b, kind k) {
  if (!is_rounded(b, k)) return wanted(b, k);
  float *at = b->exact;
  for (kind before = 0; before < k; before++)
    if (is_rounded(b, before)) at += b->run.moe->experts * elements(b, before);
  return at;
}

/* Whether one step has all slots of the expert, and so can round sums while they are in the cache;
 * rows of more than KT_OUTER_ROWS ranks are written in pieces that rounding does not take. */
static int is_at_once(const kt_back *b, kind k, int64_t active) {
  const int64_t blocks = b->first_block[active + 1] - b->first_block[active];
  const int along_ranks = k == GATE_B || k == UP_B || k == DOWN_B;
  return b->one_batch && (k >= DOWN_B || blocks == 1) &&
         (!along_ranks || b->adapter.rank <= KT_OUTER_ROWS);
}

void kt_back_round(const kt_back *b, int64_t expert) {
  const int64_t active = active_of(&b->run.route, expert);
  if (b->one_batch && active < 0) return; /* zeros */
  for (kind k = 0; k < KINDS; k++) {
    if (!is_rounded(b, k) || (active >= 0 && is_at_once(b, k, active))) continue;
    const int64_t at = expert * elements(b, k);
    kt_rows_store(KT_BF16, sums_of(b, k) + at, elements(b, k), (uint16_t *)wanted(b, k) + at);
  }
}

/* ---- Zeros ------------------------------------------------------------------------- */

void kt_back_zero(const kt_back *b, int64_t expert) {
  if (active_of(&b->run.route, expert) >= 0) return;
  for (kind k = 0; k < KINDS; k++) {
    if (!wanted(b, k)) continue;
    const size_t count = (size_t)elements(b, k), at = (size_t)expert * count;
    if (is_rounded(b, k) && b->one_batch)
      memset((uint16_t *)wanted(b, k) + at, 0, count * sizeof(uint16_t));
    else
      memset(sums_of(b, k) + at, 0, count * sizeof(float));
  }
}

/* before: the first slot of rows in the team's memory. */
static kt_rows_view view_of(const kt_back *b, const kt_back_team *t, int64_t part, kind k,
                            int64_t before) {
  const int32_t *const token = b->run.route.token;
  const int64_t width = b->run.width, hidden = b->run.moe->hidden;
  if (k == DOWN_B) return kt_back_view(b, b->dy_rows, b->h_stride, hidden, token);
  if (k == GATE_B || k == UP_B || k == DOWN_A || k == DOWN) {
    const uint8_t *const rows = k == GATE_B ? t->d_gate : k == UP_B ? t->d_up : t->middle;
    kt_rows_view own = kt_back_view(b, rows, b->w_stride, width, NULL);
    if (k == DOWN_A && b->adapter.drop_middle.below) own.drop = &b->adapter.drop_middle;
    own.before = before;
    own.first_column = part * width;
    return own;
  }
  kt_rows_view x = kt_back_view(b, b->x_rows, b->h_stride, hidden, token);
  if ((k == GATE_A || k == UP_A) && b->adapter.drop_x.below) x.drop = &b->adapter.drop_x;
  return x;
}

static gradient gradient_of(const kt_back *b, const kt_back_team *t, int64_t part, kind k,
                            int64_t expert, int64_t before) {
  const int64_t rows = rows_of(b, k), cols = cols_of(b, k), parts = b->run.moe->parts;
  int64_t at = expert * elements(b, k);
  gradient g = {.rows = rows,
                .cols = cols,
                .row = cols,
                .col = 1,
                .before = before,
                .view = view_of(b, t, part, k, before)};
  if (k == GATE_B || k == UP_B) { /* [I, rank] */
    at += part * cols * rows, g.row = 1, g.col = rows;
  } else if (k == DOWN_B) { /* [H, rank] */
    g.row = 1, g.col = rows;
  } else if (k == DOWN_A || k == DOWN) { /* [rank or H, I] */
    at += part * cols, g.row = parts * cols;
  } else if (k == GATE || k == UP) { /* [I, H] */
    at += part * rows * cols;
  }
  g.out = sums_of(b, k) + at;
  if (is_rounded(b, k)) g.rounded = (uint16_t *)wanted(b, k) + at;
  return g;
}

/* ---- The factors a ------------------------------------------------------------- */

/* bf16 values j .. j + count - 1 of a slot's row. */
static void widen(const uint8_t *row, int64_t j, int64_t count, float factor, float *a) {
  const uint16_t *const values = (const uint16_t *)(const void *)row + j;
  for (int64_t i = 0; i < count; i++) a[i] = factor * kt_float((uint32_t)values[i] << 16);
}

/* Numbers of a slot, or their sums over `parts`, `step` numbers apart. */
static void scaled(const float *row, int64_t parts, int64_t step, float factor, int64_t count,
                   float *a) {
  for (int64_t i = 0; i < count; i++) {
    float sum = row[i];
    for (int64_t part = 1; part < parts; part++) sum += row[part * step + i];
    a[i] = factor * sum;
  }
}

/* Factors j .. j + count - 1 of a slot. */
static void factors(const kt_back *b, const kt_back_team *t, kind k, int64_t slot, int64_t before,
                    int64_t j, int64_t count, float *a) {
  const int64_t rank = b->adapter.rank, pair = b->slots * 2 * rank, parts = b->run.moe->parts;
  const int64_t at = kt_back_first_slot(b) + slot;
  const float factor = b->adapter.factor, weight = b->run.route.weight[slot];
  const float *const v = b->v_pair + slot * 2 * rank + j;
  const float *const x = b->saved.x_products + at * 2 * rank + j;
  switch (k) {
  case GATE_B: scaled(x, 1, 0, factor, count, a); break;
  case UP_B: scaled(x + rank, 1, 0, factor, count, a); break;
  case GATE_A: scaled(v, parts, pair, factor, count, a); break;
  case UP_A: scaled(v + rank, parts, pair, factor, count, a); break;
  case DOWN_A: scaled(b->v_down + slot * rank + j, 1, 0, factor * weight, count, a); break;
  case DOWN_B:
    scaled(kt_saved_product(&b->saved, 0, at, rank) + j, parts, b->saved.pairs * rank,
           factor * weight, count, a);
    break;
  case GATE: widen(t->d_gate + (slot - before) * b->w_stride, j, count, 1.0f, a); break;
  case UP: widen(t->d_up + (slot - before) * b->w_stride, j, count, 1.0f, a); break;
  default: widen(b->dy_rows + b->run.route.token[slot] * b->h_stride, j, count, weight, a);
  }
}

/* ---- Items: blocks of a gradient -------------------------------------------------- */

typedef struct block {
  int64_t row, rows, col, cols;
} block;

/* Columns of a block, a multiple of 32 as kt_outer wants it: more of few rows, for which factors
 * are prepared as for many. */
static int64_t block_cols(int64_t rows) {
  const int64_t padded = kt_smaller(kt_ceil_div(rows, 16) * 16, KT_OUTER_ROWS);
  return KT_OUTER_COLS * KT_OUTER_ROWS / padded / KT_STRIP * KT_STRIP;
}

static int64_t blocks_of(const kt_back *b, kind k) {
  if (!wanted(b, k)) return 0;
  const int64_t rows = rows_of(b, k);
  return kt_ceil_div(rows, KT_OUTER_ROWS) * kt_ceil_div(cols_of(b, k), block_cols(rows));
}

static block block_at(const gradient *g, int64_t item) {
  const int64_t most = block_cols(g->rows), across = kt_ceil_div(g->cols, most);
  const int64_t row = item / across * KT_OUTER_ROWS, col = item % across * most;
  return (block){row, kt_smaller(KT_OUTER_ROWS, g->rows - row), col,
                 kt_smaller(most, g->cols - col)};
}

/* Where the sums of a block are. */
typedef struct place {
  float *out;
  int64_t row, col;
} place;

static place place_of(const gradient *g, const block *at) {
  return (place){g->out + at->row * g->row + at->col * g->col, g->row, g->col};
}

/* The same in memory of the thread, without what lies between them. */
static place own_place(const gradient *g, const block *at, float *memory) {
  return g->col == 1 ? (place){memory, at->cols, 1} : (place){memory, 1, at->rows};
}

/* Sums of a block that has all ranks, or rows along columns, to bf16. */
static void round_block(const gradient *g, const block *at, const place *sums) {
  const int along = g->col == 1;
  const int64_t runs = along ? at->rows : 1, run = along ? at->cols : at->rows * at->cols;
  uint16_t *const to = g->rounded + at->row * g->row + at->col * g->col;
  for (int64_t i = 0; i < runs; i++)
    kt_rows_store(KT_BF16, sums->out + i * sums->row, run, to + i * g->row);
}

static void add_block(const kt_back *b, const kt_back_team *t, const kt_back_worker *w, kind k,
                      const gradient *g, const block *at, const place *to,
                      const kt_back_block *slots, int fresh) {
  const int64_t slot = slots->slot, count = slots->count;
  kt_rows_view view = g->view;
  view.rows += 2 * at->col, view.first_column += at->col, view.cols = at->cols;
  int64_t stride = view.stride;
  const uint8_t *rows = view.rows;
  const int32_t *index = view.index ? view.index + slot : NULL;
  if (view.drop)
    rows = kt_view_rows(&view, slot, count, w->lora.gather, &stride), index = NULL;
  else if (!index)
    rows += (slot - view.before) * stride;
  for (int64_t i = 0; i < count; i++)
    factors(b, t, k, slot + i, g->before, at->row, at->rows, w->a + i * KT_OUTER_ROWS);
  const kt_outer outer = {.a = w->a,
                          .b = rows,
                          .index = index,
                          .count = count,
                          .rank = at->rows,
                          .cols = at->cols,
                          .a_stride = KT_OUTER_ROWS,
                          .b_stride = stride,
                          .out = to->out,
                          .row = to->row,
                          .col = to->col,
                          .fresh = fresh,
                          .scratch = w->outer};
  b->outer_product(&outer);
}

/* Of a part where a group is given, else of all. */
static int64_t items_of_expert(const kt_back *b, const kt_back_group *g) {
  int64_t items = 0;
  for (kind k = g ? GATE_B : DOWN_B; k < (g ? DOWN_B : KINDS); k++) items += blocks_of(b, k);
  return items;
}

static int64_t experts_of(const kt_back *b, const kt_back_group *g) {
  const int64_t active = b->run.route.active_count;
  if (!active) return 0;
  return g ? b->blocks[g->end - 1].active + 1 - b->blocks[g->first].active : active;
}

int64_t kt_back_outer_items(const kt_back *b, const kt_back_group *g) {
  return experts_of(b, g) * items_of_expert(b, g);
}

void kt_back_outer(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                   const kt_back_group *g, int64_t part, int64_t item) {
  const int64_t each = items_of_expert(b, g);
  const int64_t active = (g ? b->blocks[g->first].active : 0) + item / each;
  const int64_t first = b->first_block[active], end = b->first_block[active + 1];
  int64_t left = item % each;
  kind k = g ? GATE_B : DOWN_B;
  for (; left >= blocks_of(b, k); k++) left -= blocks_of(b, k);
  const gradient d = gradient_of(b, t, part, k, b->run.route.active[active], g ? g->slot : 0);
  const block at = block_at(&d, left);
  const int at_once = d.rounded && is_at_once(b, k, active);
  const place to = at_once ? own_place(&d, &at, w->exact) : place_of(&d, &at);
  for (int64_t i = g ? kt_larger(first, g->first) : first; i < (g ? kt_smaller(end, g->end) : end);
       i++)
    add_block(b, t, w, k, &d, &at, &to, b->blocks + i, i == first && b->run.first_token == 0);
  if (at_once) round_block(&d, &at, &to);
}
