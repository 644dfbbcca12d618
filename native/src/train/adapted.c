/* LoRA in the forward, and what is kept of it. */
#include "adapted.h"

#include "../moe/rows.h"

#include <math.h>
#include <string.h>

/* ---- Memory ---------------------------------------------------------------- */

static int makes_bf16(const kt_run *r, const kt_adapted *a) {
  return kt_rows_of(r->moe, &a->adapter) == KT_ROWS_BF16;
}

void kt_take_adapted(kt_arena *arena, const kt_run *r, int64_t slots, kt_adapted *a) {
  const int64_t x_rows = kt_adapts_x(&a->adapter) && !makes_bf16(r, a) ? r->tokens : 0;
  const int64_t pairs = kt_adapts_x(&a->adapter) ? slots : 0;
  a->x_stride = (int64_t)kt_rows_stride(KT_ROWS_BF16, r->moe->hidden, 0);
  a->x_rows = kt_take(arena, x_rows, (size_t)a->x_stride);
  a->pairs = kt_take(arena, pairs, pairs ? (size_t)kt_pair_stride(&a->adapter) : 1);
  a->values = kt_take(arena, a->saves ? 0 : pairs * 2 * a->adapter.rank, sizeof(float));
  if (!x_rows) a->x_rows = NULL;
}

void kt_take_adapted_team(kt_arena *arena, const kt_run *r, const kt_adapted *a, int64_t slots,
                          kt_adapted_team *t) {
  const int64_t number = kt_adapts(&a->adapter, KT_DOWN) ? slots : 0;
  const int64_t middles = makes_bf16(r, a) ? 0 : number;
  kt_adapted_team laid = {.stride = (int64_t)kt_rows_stride(KT_ROWS_BF16, r->width, 0)};
  laid.middle = kt_take(arena, middles, (size_t)laid.stride);
  laid.rows = kt_take(arena, number, number ? (size_t)kt_down_stride(&a->adapter) : 1);
  laid.values = kt_take(arena, a->saves ? 0 : number * a->adapter.rank, sizeof(float));
  if (!middles) laid.middle = NULL;
  if (t) *t = laid;
}

/* Strips: one of the longest rows, or those of B of gate and up of one item. */
void kt_take_lora_worker(kt_arena *arena, const kt_run *r, const kt_adapter *adapter,
                         kt_lora_worker *w) {
  if (!adapter->lora) return;
  const int64_t longest = kt_larger(r->moe->hidden, r->width);
  const int64_t cols = kt_larger(longest, 2 * KT_MAX_STRIPS * adapter->pair_cols);
  const kt_lora_worker laid = {
      .gather = kt_take(arena, 1, kt_gather_size(longest)),
      .strips = kt_take(arena, cols, KT_STRIP * 2),
      .spare = kt_take(arena, kt_larger(longest, adapter->pair_cols), KT_STRIP * 2),
      .out = kt_take(arena, KT_MAX_TOKENS * KT_STRIP, sizeof(float)),
  };
  if (w) *w = laid;
}

/* ---- A x of gate and up ------------------------------------------------------- */

void kt_adapted_start(const kt_run *r, kt_adapted *a) {
  const int32_t threads = kt_pool_threads(r->pool);
  kt_share_init(&a->rows, a->x_rows ? r->tokens : 0, 1, threads);
  kt_share_init(&a->experts, r->route.active_count, 1, threads);
}

/* Slot 0 of the batch in arrays of the whole call. */
static int64_t first_slot(const kt_run *r) { return r->first_token * r->top_k; }

static void make_pair_a(const kt_narrow *n, int64_t strip, uint8_t *out, uint8_t *spare) {
  kt_pair_a_strip(n->in.adapter, n->expert, strip, out, spare);
}

/* Columns of the part. */
static void make_down_a(const kt_narrow *n, int64_t strip, uint8_t *out, uint8_t *spare) {
  (void)spare;
  const kt_plain m = kt_lora_a(n->in.adapter, KT_DOWN, n->expert);
  n->in.adapter->strips->rows(&m, strip * KT_STRIP, -n->part * n->width, n->width, out);
}

/* From what narrow products left of some slots to the rows that B reads. */
static void make_rows(const kt_narrow *n, int64_t count, int64_t cols, uint16_t *rows) {
  const float factor = n->in.adapter->factor;
  for (int64_t i = 0; i < count; i++)
    kt_scaled_row(n->values + i * n->value_stride, n->outputs, factor, cols, rows + i * cols);
}

static void pair_products(const kt_run *r, const kt_adapted *a, const kt_lora_worker *w,
                          const kt_rows_view *in, uint8_t *panel, int64_t active) {
  const int64_t slot = r->route.start[active], count = r->route.start[active + 1] - slot;
  const int64_t number = 2 * a->adapter.rank;
  float *const values = a->saves ? a->saved.x_products + first_slot(r) * number : a->values;
  const kt_narrow n = {.in = *in,
                       .make = make_pair_a,
                       .expert = r->route.active[active],
                       .outputs = number,
                       .values = values + slot * number,
                       .values_before = slot,
                       .value_stride = number};
  kt_narrow_products(&n, w, panel, slot, count);
  make_rows(&n, count, a->adapter.pair_cols, a->pairs + slot * a->adapter.pair_cols);
}

/* The view of the rows `own`, or of those of this file's. */
static kt_rows_view view_of(const kt_run *r, const kt_adapted *a, const kt_rows_view *own,
                            const uint8_t *others, int64_t stride, const kt_drop *drop) {
  kt_rows_view view = *own;
  if (others) view.rows = others, view.stride = stride;
  view.adapter = &a->adapter;
  view.drop = drop->below ? drop : NULL;
  view.pair = r->route.pair, view.first_pair = first_slot(r);
  return view;
}

void kt_adapted_inputs(kt_run *r, kt_adapted *a, int32_t thread, const kt_lora_worker *w,
                       const kt_matrix *x, const kt_rows_view *own, float *values, uint8_t *panel) {
  if (!kt_adapts_x(&a->adapter)) return;
  kt_decode_rows_fn *const read = kt_decode_rows_best();
  for (int64_t first, count; kt_share_take(&a->rows, &first, &count);)
    for (int64_t token = first; token < first + count; token++) {
      read(x, r->first_token + token, 1, values, r->moe->hidden);
      kt_rows_quantize(KT_ROWS_BF16, r->moe->hidden, 0, values, a->x_rows + token * a->x_stride);
    }
  kt_barrier_wait(&r->all, thread);
  const kt_rows_view in = view_of(r, a, own, a->x_rows, a->x_stride, &a->adapter.drop_x);
  for (int64_t first, count; kt_share_take(&a->experts, &first, &count);)
    for (int64_t i = first; i < first + count; i++) pair_products(r, a, w, &in, panel, i);
  kt_barrier_wait(&r->all, thread);
}

/* The gate whose SiLU is `limit`: SiLU rises from there on, and lies below its argument. */
static float silu_cut(float limit) {
  double low = (double)limit, high = (double)limit + 1.0;
  for (int i = 0; i < 60; i++) {
    const double middle = (low + high) / 2;
    if (middle / (1 + exp(-middle)) > (double)limit)
      high = middle;
    else
      low = middle;
  }
  return (float)low;
}

void kt_adapted_cuts(kt_adapted *a, const kt_activation *activation) {
  const float limit = activation->limit;
  const int after = activation->function == KT_SWIGLU_CLAMPED && limit < INFINITY;
  a->up_cut = limit, a->gate_cut = after ? silu_cut(limit) : limit;
}

/* ---- B of gate and up ------------------------------------------------------------ */

/* Where the strips of a projection lie: gate's first. */
static uint8_t *inner_strips(const kt_adapted *a, const kt_lora_worker *w, kt_projection p) {
  const int64_t size = KT_MAX_STRIPS * a->adapter.pair_cols * KT_STRIP * 2;
  return w->strips + (p == KT_UP ? size : 0);
}

void kt_adapted_inner_strips(const kt_adapted *a, const kt_run *r, const kt_lora_worker *w,
                             const kt_inner_item *item) {
  for (kt_projection p = KT_GATE; p <= KT_UP; p++)
    if (kt_adapts(&a->adapter, p))
      kt_b_strips(&a->adapter, p, item->expert, item->part * r->width + item->row, item->strips,
                  inner_strips(a, w, p));
}

void kt_adapted_add_inner(const kt_adapted *a, const kt_lora_worker *w, uint8_t *panel,
                          kt_projection p, const kt_inner_item *item, int64_t slot, int64_t count,
                          float *out) {
  if (!kt_adapts(&a->adapter, p)) return;
  const kt_pair_side side = kt_side_of(&a->adapter, p);
  const int64_t stride = kt_pair_stride(&a->adapter);
  const kt_weight b = kt_strip_weight(inner_strips(a, w, p), item->strips, side.cols);
  const uint8_t *const rows = (const uint8_t *)a->pairs + slot * stride + side.offset;
  a->adapter.add(&b, 0, item->strips, rows, stride, count, out, panel);
}

void kt_adapted_stream_inner(const kt_adapted *a, const kt_lora_worker *w, kt_projection p,
                             const kt_inner_item *item, int64_t slot, int64_t count,
                             kt_beside *beside, float *out) {
  if (!kt_adapts(&a->adapter, p)) return;
  const kt_pair_side side = kt_side_of(&a->adapter, p);
  const int64_t stride = kt_pair_stride(&a->adapter);
  const kt_weight b = kt_strip_weight(inner_strips(a, w, p), item->strips, side.cols);
  const uint8_t *const rows = (const uint8_t *)a->pairs + slot * stride + side.offset;
  a->adapter.add_beside(&b, 0, rows, stride, count, beside, out);
}

kt_keep kt_adapted_keep(const kt_adapted *a, const kt_run *r, kt_projection p,
                        const kt_inner_item *item, const float *products, const float *bias,
                        int64_t slot, int64_t count) {
  const int64_t at = first_slot(r) + slot;
  if (!a->saves) return (kt_keep){.rows = NULL};
  return (kt_keep){.products = products,
                   .bias = bias,
                   .tokens = count,
                   .cut = p == KT_GATE ? a->gate_cut : a->up_cut,
                   .rows = p == KT_GATE
                               ? kt_saved_gate(&a->saved, item->part, at, item->row)
                               : kt_saved_up(&a->saved, item->part, at, item->row, r->width),
                   .stride = KT_STRIP};
}

void kt_adapted_save_inner(const kt_adapted *a, const kt_run *r, kt_projection p,
                           const kt_inner_item *item, const float *products, const float *bias,
                           int64_t slot, int64_t count) {
  if (!a->saves) return;
  kt_keep k = kt_adapted_keep(a, r, p, item, products, bias, slot, count);
  for (int64_t s = 0; s < item->strips; s++) {
    a->adapter.math->keep(&k, 0, count);
    k.products += count * KT_STRIP, k.rows += a->saved.pairs * KT_STRIP;
    if (bias) k.bias += KT_STRIP;
  }
}

/* ---- Down -------------------------------------------------------------------------- */

void kt_adapted_middle(const kt_adapted *a, const kt_run *r, const kt_adapted_team *t, int64_t part,
                       int64_t slot, int64_t before, const float *middle, const uint8_t *row) {
  if (t->middle)
    kt_rows_quantize(KT_ROWS_BF16, r->width, 0, middle, t->middle + (slot - before) * t->stride);
  if (!a->saves || !a->saved.groups) return;
  const float *const scale =
      (const float *)(const void *)(row + kt_rows_codes_size(r->format->rows_kind, r->width));
  float *const to = kt_saved_scale(&a->saved, part, first_slot(r) + slot);
  memcpy(kt_saved_codes(&a->saved, part, first_slot(r) + slot, r->width), row, (size_t)r->width);
  for (int64_t g = 0; g < a->saved.groups; g++) to[g] = scale[g];
}

void kt_adapted_down_rows(const kt_adapted *a, const kt_run *r, const kt_adapted_team *t,
                          const kt_lora_worker *w, const kt_rows_view *own, uint8_t *panel,
                          int64_t part, int64_t active, int64_t slot, int64_t count) {
  const int64_t rank = a->adapter.rank, before = own->before;
  kt_narrow n = {.in = view_of(r, a, own, t->middle, t->stride, &a->adapter.drop_middle),
                 .make = make_down_a,
                 .expert = r->route.active[active],
                 .part = part,
                 .width = r->width,
                 .outputs = rank,
                 .values = t->values + (slot - before) * rank,
                 .values_before = slot,
                 .value_stride = rank};
  n.in.first_column = part * r->width;
  if (a->saves) n.values = kt_saved_product(&a->saved, part, first_slot(r) + slot, rank);
  kt_narrow_products(&n, w, panel, slot, count);
  make_rows(&n, count, a->adapter.cols, t->rows + (slot - before) * a->adapter.cols);
}

void kt_adapted_down_strips(const kt_adapted *a, const kt_lora_worker *w, int64_t expert,
                            int64_t row, int64_t strips) {
  if (kt_adapts(&a->adapter, KT_DOWN))
    kt_b_strips(&a->adapter, KT_DOWN, expert, row, strips, w->strips);
}

void kt_adapted_add_down(const kt_adapted *a, const kt_adapted_team *t, const kt_lora_worker *w,
                         uint8_t *panel, int64_t strips, int64_t at, int64_t count, float *out) {
  if (!kt_adapts(&a->adapter, KT_DOWN)) return;
  const int64_t stride = kt_down_stride(&a->adapter);
  const kt_weight b = kt_strip_weight(w->strips, strips, a->adapter.cols);
  a->adapter.add(&b, 0, strips, (const uint8_t *)t->rows + at * stride, stride, count, out, panel);
}

void kt_adapted_stream_down(const kt_adapted *a, const kt_adapted_team *t, const kt_lora_worker *w,
                            int64_t at, int64_t count, kt_beside *beside, float *out) {
  if (!kt_adapts(&a->adapter, KT_DOWN)) return;
  const int64_t stride = kt_down_stride(&a->adapter);
  const kt_weight b = kt_strip_weight(w->strips, 1, a->adapter.cols);
  a->adapter.add_beside(&b, 0, (const uint8_t *)t->rows + at * stride, stride, count, beside, out);
}
