/* Gate and up products of a group of experts, and their activation.
 *
 * An item is some strips of w for a block of tokens of an expert; blocks are as large as leaves
 * their activations in L2 beside the weights. */
#include "steps.h"

#include <string.h>

/* Of the items of a group. */
typedef struct item {
  int64_t active, slot, count; /* of the expert, and of its block of tokens */
  int64_t strip, strips;
} item;

static kt_blocks blocks_of(const kt_forward_run *f, int64_t active) {
  return kt_expert_blocks(&f->run.route, active, f->most_tokens);
}

/* Strips of an item of a block of so many tokens. */
static int64_t strips_of(const kt_forward_run *f, const kt_team *t, const kt_group *g,
                         int64_t tokens) {
  if (kt_streams(f, tokens)) return 1;
  const int64_t strips = f->run.width / KT_STRIP * (g->end - g->first);
  return kt_strips_per_item(strips, t->threads, tokens);
}

static int64_t largest(const kt_blocks *b) { return kt_ceil_div(b->count, b->number); }

static int64_t items_of_expert(const kt_forward_run *f, const kt_team *t, const kt_group *g,
                               int64_t active) {
  const kt_blocks b = blocks_of(f, active);
  return b.number * kt_ceil_div(f->run.width / KT_STRIP, strips_of(f, t, g, largest(&b)));
}

int64_t kt_inner_items(const kt_forward_run *f, const kt_team *t, const kt_group *g) {
  int64_t items = 0;
  for (int64_t a = g->first; a < g->end; a++) items += items_of_expert(f, t, g, a);
  return items;
}

static item item_at(const kt_forward_run *f, const kt_team *t, const kt_group *g, int64_t number) {
  int64_t a = g->first;
  for (int64_t here; (here = items_of_expert(f, t, g, a)) <= number; number -= here) a++;
  const kt_blocks b = blocks_of(f, a);
  const int64_t all = f->run.width / KT_STRIP, most = strips_of(f, t, g, largest(&b));
  const int64_t per_block = kt_ceil_div(all, most), block = number / per_block;
  const int64_t slot = kt_block_start(&b, block), strip = number % per_block * most;
  return (item){a, slot, kt_block_start(&b, block + 1) - slot, strip,
                kt_smaller(most, all - strip)};
}

/* Where it begins. */
static kt_place place_of(const kt_forward_run *f, int64_t part, const item *i) {
  const kt_expert *const e = kt_expert_at(&f->run, part, i->active);
  const int gated = kt_has_gate(f->run.moe->activation.function);
  return (kt_place){gated ? kt_gate_weight(&f->run, e) : kt_up_weight(&f->run, e), i->strip, 1};
}

kt_place kt_inner_place(const kt_forward_run *f, const kt_team *t, const kt_group *g, int64_t part,
                        kt_cursor cursor) {
  int64_t number;
  if (!kt_cursor_take(&cursor, &number)) return (kt_place){.strips = 0};
  const item i = item_at(f, t, g, number);
  return place_of(f, part, &i);
}

/* Activation rows of `count` slots from `slot` on: in place where their tokens follow one
 * another, else copied side by side. */
static const uint8_t *x_rows_of(const kt_forward_run *f, const kt_team *t, kt_worker *w,
                                int64_t slot, int64_t count) {
  const int32_t *token = f->run.route.token + slot;
  const size_t stride = (size_t)f->x_stride;
  if (kt_in_a_row(token, count)) return t->x_rows + (size_t)token[0] * stride;
  if (w->gathered == slot) return w->gather;
  kt_beside_finish(&w->beside); /* which reads the scales of the rows before */
  for (int64_t i = 0; i < count; i++)
    memcpy(w->gather + (size_t)i * stride, t->x_rows + (size_t)token[i] * stride, stride);
  w->gathered = slot;
  return w->gather;
}

static kt_inner inner_of(const kt_forward_run *f, const kt_team *t, const kt_group *g,
                         const kt_expert *e, const item *i) {
  const int64_t row = i->strip * KT_STRIP, width = f->run.width;
  return (kt_inner){.gate_bias = e->gate_bias ? e->gate_bias + row : NULL,
                    .up_bias = e->up_bias ? e->up_bias + row : NULL,
                    .strips = i->strips,
                    .out = t->middle + (i->slot - g->slot) * width + row,
                    .stride = width};
}

/* ---- Streamed ---------------------------------------------------------------- */

static void activate(void *context, int64_t first, int64_t end) {
  const kt_worker *const w = context;
  for (int i = 0; i < 2; i++)
    if (w->keep[i].rows) w->math->keep(w->keep + i, first, end);
  w->activate(w->activation, w->inner + w->at_work, first, end);
}

/* Whether anything is added to products of gate and up, or kept of them. */
static int is_adapted(const kt_forward_run *f) {
  return f->adapted.saves || f->adapted.adapter.lora;
}

/* The numbers of a streamed product, with LoRA, in the place of its sums. */
static void adapt(const kt_forward_run *f, kt_worker *w, kt_projection p, const kt_inner_item *lora,
                  const item *i, float *numbers, kt_sums *sums) {
  kt_numbers_in_place(f, i->count, numbers, sums);
  kt_adapted_stream_inner(&f->adapted, &w->lora, p, lora, i->slot, i->count, &w->beside, numbers);
}

/* Adds what adapters have to the sums of gate or up of an item. */
static void serve(const kt_forward_run *f, int64_t part, kt_projection p, const item *i,
                  kt_beside *beside, float *plus, kt_sums *sums) {
  if (!kt_is_served(&f->served, i->active)) return;
  const kt_served_item served = {.active = i->active,
                                 .slot = i->slot,
                                 .count = i->count,
                                 .row = part * f->run.width + i->strip * KT_STRIP,
                                 .strips = i->strips,
                                 .projection = p};
  kt_served_products(&f->run, &f->served, &served, &f->served.inner, 0, beside, plus);
  sums->plus = plus;
}

/* One strip; `next`: of the item behind it. */
static void stream_item(kt_forward_run *f, const kt_team *t, kt_worker *w, const kt_group *g,
                        int64_t part, const item *i, const kt_place *next) {
  const kt_run *const r = &f->run;
  const kt_expert *const e = kt_expert_at(r, part, i->active);
  const int gated = kt_has_gate(r->moe->activation.function), adapted = is_adapted(f);
  const kt_place up = {kt_up_weight(r, e), i->strip, 1};
  const kt_weight gate = kt_gate_weight(r, e);
  const uint8_t *const x = x_rows_of(f, t, w, i->slot, i->count);
  const kt_inner_item lora = {r->route.active[i->active], part, i->strip * KT_STRIP, 1};
  const int64_t odd = w->strip_number++ % 2;
  kt_inner *const inner = w->inner + odd;
  float *const gates = kt_stream_sums(w, odd), *const ups = kt_stream_sums(w, 2 + odd);
  *inner = inner_of(f, t, g, e, i);
  if (adapted) kt_adapted_inner_strips(&f->adapted, r, &w->lora, &lora);
  if (gated) {
    kt_fetch_place(w, &up, 1);
    f->stream(&gate, i->strip, x, f->x_stride, i->count, &w->beside, gates, &inner->gate);
    if (adapted) adapt(f, w, KT_GATE, &lora, i, gates, &inner->gate);
    serve(f, part, KT_GATE, i, &w->beside, kt_stream_plus(w, odd), &inner->gate);
  }
  kt_fetch_place(w, next, 1);
  f->stream(&up.weight, i->strip, x, f->x_stride, i->count, &w->beside, ups, &inner->up);
  if (adapted) adapt(f, w, KT_UP, &lora, i, ups, &inner->up);
  serve(f, part, KT_UP, i, &w->beside, kt_stream_plus(w, 2 + odd), &inner->up);
  kt_beside_finish(&w->beside);
  w->at_work = odd;
  if (f->adapted.saves && gated)
    w->keep[0] =
        kt_adapted_keep(&f->adapted, r, KT_GATE, &lora, gates, inner->gate_bias, i->slot, i->count);
  if (f->adapted.saves)
    w->keep[1] =
        kt_adapted_keep(&f->adapted, r, KT_UP, &lora, ups, inner->up_bias, i->slot, i->count);
  kt_beside_work(&w->beside, activate, w, i->count, gated ? 2 : 1);
}

/* ---- Not streamed -------------------------------------------------------------- */

/* Up alone where the function has no gate. */
static void multiply_item(kt_forward_run *f, const kt_team *t, kt_worker *w, const kt_group *g,
                          int64_t part, const item *i) {
  const kt_run *const r = &f->run;
  const kt_expert *const e = kt_expert_at(r, part, i->active);
  const kt_weight gate = kt_gate_weight(r, e), up = kt_up_weight(r, e);
  const kt_inner_item adapted = {r->route.active[i->active], part, i->strip * KT_STRIP, i->strips};
  const uint8_t *const x = x_rows_of(f, t, w, i->slot, i->count);
  float *const gates = w->sums, *const ups = w->sums + KT_MAX_PRODUCTS * KT_STRIP;
  kt_inner inner = inner_of(f, t, g, e, i);
  kt_beside_finish(&w->beside);
  if (is_adapted(f)) kt_beside_leave(&w->beside); /* its products have tiles of their own */
  kt_adapted_inner_strips(&f->adapted, r, &w->lora, &adapted);
  if (kt_has_gate(r->moe->activation.function)) {
    f->product(&gate, i->strip, i->strips, x, f->x_stride, i->count, gates, w->panel);
    kt_adapted_add_inner(&f->adapted, &w->lora, w->panel, KT_GATE, &adapted, i->slot, i->count,
                         gates);
    kt_adapted_save_inner(&f->adapted, r, KT_GATE, &adapted, gates, inner.gate_bias, i->slot,
                          i->count);
  }
  f->product(&up, i->strip, i->strips, x, f->x_stride, i->count, ups, w->panel);
  kt_adapted_add_inner(&f->adapted, &w->lora, w->panel, KT_UP, &adapted, i->slot, i->count, ups);
  kt_adapted_save_inner(&f->adapted, r, KT_UP, &adapted, ups, inner.up_bias, i->slot, i->count);
  inner.gate = kt_sums_of(gates, i->count), inner.up = kt_sums_of(ups, i->count);
  if (kt_has_gate(r->moe->activation.function))
    serve(f, part, KT_GATE, i, NULL, w->plus, &inner.gate);
  serve(f, part, KT_UP, i, NULL, w->plus + KT_MAX_PRODUCTS * KT_STRIP, &inner.up);
  f->activate(&r->moe->activation, &inner, 0, i->count);
}

void kt_inner_step(kt_forward_run *f, kt_team *t, kt_worker *w, kt_group *g, int64_t part,
                   kt_cursor *cursor, const kt_place *then) {
  int64_t number;
  int more = kt_cursor_take(cursor, &number);
  w->gathered = -1;
  while (more) {
    const item i = item_at(f, t, g, number);
    kt_place next = *then;
    more = kt_cursor_take(cursor, &number);
    if (more) {
      const item later = item_at(f, t, g, number);
      next = place_of(f, part, &later);
    }
    if (kt_streams(f, i.count))
      stream_item(f, t, w, g, part, &i, &next);
    else
      multiply_item(f, t, w, g, part, &i);
  }
  kt_beside_finish(&w->beside);
}
