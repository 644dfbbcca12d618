/* Down products of a group of experts, times the weights of their tokens, added to y. */
#include "steps.h"

enum { REGION = 48 * 1024 /* bytes of strips that are fetched together */ };

int64_t kt_down_items(const kt_forward_run *f) {
  return kt_ceil_div(f->run.moe->hidden / KT_STRIP, f->down_strips);
}

void kt_fetch_place(kt_worker *w, const kt_place *next, int64_t products) {
  kt_beside *const b = &w->beside;
  const int there = next->strips > 0;
  const int64_t regions = there ? kt_strip_regions(&next->weight, next->strip, next->strips,
                                                   KT_BESIDE_REGIONS, b->region)
                                : 0;
  kt_beside_fetch(b, regions, products);
  b->following = there ? &next->weight : NULL;
  b->following_strip = next->strip;
}

int64_t kt_down_together(const kt_run *r) {
  const int64_t size = (int64_t)kt_packed_size(&r->moe->layout, KT_STRIP, r->width);
  return kt_larger(1, kt_smaller(8, REGION / size));
}

static kt_place place_at(const kt_forward_run *f, int64_t part, int64_t active, int64_t strip,
                         int64_t end) {
  const kt_expert *const e = kt_expert_at(&f->run, part, active);
  return (kt_place){kt_down_weight(&f->run, e), strip, kt_smaller(f->down_together, end - strip)};
}

kt_place kt_down_place(const kt_forward_run *f, const kt_group *g, int64_t part, kt_cursor cursor) {
  int64_t number;
  if (!kt_cursor_take(&cursor, &number)) return (kt_place){.strips = 0};
  return place_at(f, part, g->first, number * f->down_strips, f->run.moe->hidden / KT_STRIP);
}

static kt_weighted weighted_of(const kt_forward_run *f, const kt_expert *e, int64_t part,
                               int64_t strip, int64_t strips, int64_t slot) {
  const kt_route *const route = &f->run.route;
  return (kt_weighted){.bias = e->down_bias ? e->down_bias + strip * KT_STRIP : NULL,
                       .strips = strips,
                       .weight = route->weight + slot,
                       .token = route->token + slot,
                       .fresh = route->fresh + slot,
                       .y = f->parts[part].partial + strip * KT_STRIP,
                       .stride = f->run.moe->hidden};
}

static void add_weighted(void *context, int64_t first, int64_t end) {
  const kt_worker *const w = context;
  w->epilogue->add_weighted(w->weighted + w->at_work, first, end);
}

/* Strips of one expert for a thread: first .. end of the rows of down. */
typedef struct stretch {
  int64_t part, active, first, end;
} stretch;

static const uint8_t *rows_at(const kt_forward_run *f, const kt_team *t, const kt_group *g,
                              int64_t slot) {
  return t->mid_rows + (slot - g->slot) * f->mid_stride;
}

/* The numbers of a streamed product, with LoRA, in the place of its sums. */
static void adapt(const kt_forward_run *f, const kt_team *t, kt_worker *w, int64_t at,
                  int64_t count, float *numbers, kt_sums *sums) {
  kt_numbers_in_place(f, count, numbers, sums);
  kt_adapted_stream_down(&f->adapted, &t->adapted, &w->lora, at, count, &w->beside, numbers);
}

/* Adds what adapters have to the sums of `strips`, of some slots of an expert. */
static void serve(const kt_forward_run *f, const kt_team *t, const kt_group *g, int64_t active,
                  int64_t strip, int64_t strips, int64_t slot, int64_t count, kt_beside *beside,
                  float *plus, kt_sums *sums) {
  if (!kt_is_served(&f->served, active)) return;
  const kt_served_item item = {.active = active,
                               .slot = slot,
                               .count = count,
                               .row = strip * KT_STRIP,
                               .strips = strips,
                               .projection = KT_DOWN};
  kt_served_products(&f->run, &f->served, &item, &t->served, g->slot, beside, plus);
  sums->plus = plus;
}

/* One strip for all blocks of tokens. */
static void stream_strip(kt_forward_run *f, const kt_team *t, kt_worker *w, const kt_group *g,
                         const stretch *s, const kt_weight *down, int64_t strip,
                         const kt_place *following) {
  const kt_expert *const e = kt_expert_at(&f->run, s->part, s->active);
  const kt_blocks b = kt_expert_blocks(&f->run.route, s->active, f->most_tokens);
  const int adapted = kt_adapts(&f->adapted.adapter, KT_DOWN);
  kt_adapted_down_strips(&f->adapted, &w->lora, f->run.route.active[s->active], strip * KT_STRIP,
                         1);
  for (int64_t i = 0; i < b.number; i++) {
    const int64_t slot = kt_block_start(&b, i), count = kt_block_start(&b, i + 1) - slot;
    const int last = i + 1 == b.number;
    const int64_t odd = w->strip_number++ % 2;
    float *const sums = kt_stream_sums(w, odd);
    kt_weighted *const weighted = w->weighted + odd;
    *weighted = weighted_of(f, e, s->part, strip, 1, slot);
    w->beside.following = !last ? down : following->strips ? &following->weight : NULL;
    w->beside.following_strip = last ? following->strip : strip;
    f->stream(down, strip, rows_at(f, t, g, slot), f->mid_stride, count, &w->beside, sums,
              &weighted->down);
    if (adapted) adapt(f, t, w, slot - g->slot, count, sums, &weighted->down);
    serve(f, t, g, s->active, strip, 1, slot, count, &w->beside, kt_stream_plus(w, odd),
          &weighted->down);
    kt_beside_finish(&w->beside);
    w->at_work = odd;
    kt_beside_work(&w->beside, add_weighted, w, count, 1);
  }
}

/* `then`: what follows the last strip. */
static void stream_stretch(kt_forward_run *f, const kt_team *t, kt_worker *w, const kt_group *g,
                           const stretch *s, const kt_place *then) {
  const kt_weight down = kt_down_weight(&f->run, kt_expert_at(&f->run, s->part, s->active));
  const kt_blocks b = kt_expert_blocks(&f->run.route, s->active, f->most_tokens);
  const int64_t together = f->down_together;
  for (int64_t strip = s->first; strip < s->end; strip++) {
    const int64_t next = strip + together;
    if ((strip - s->first) % together == 0) {
      const kt_place more = place_at(f, s->part, s->active, next, s->end);
      kt_fetch_place(w, next < s->end ? &more : then, together * b.number);
    }
    const int last = strip + 1 == s->end;
    const kt_place following = last ? *then : (kt_place){down, strip + 1, 1};
    stream_strip(f, t, w, g, s, &down, strip, &following);
  }
}

static void multiply_stretch(kt_forward_run *f, const kt_team *t, kt_worker *w, const kt_group *g,
                             const stretch *s) {
  const kt_run *const r = &f->run;
  const kt_expert *const e = kt_expert_at(r, s->part, s->active);
  const kt_weight down = kt_down_weight(r, e);
  const kt_blocks b = kt_expert_blocks(&r->route, s->active, KT_MAX_TOKENS);
  const int64_t largest = kt_ceil_div(b.count, b.number);
  const int64_t most = kt_smaller(KT_MAX_STRIPS, KT_MAX_PRODUCTS / largest);
  kt_beside_finish(&w->beside);
  if (kt_adapts(&f->adapted.adapter, KT_DOWN)) kt_beside_leave(&w->beside); /* as there */
  for (int64_t strip = s->first, strips; strip < s->end; strip += strips) {
    strips = kt_smaller(most, s->end - strip);
    kt_adapted_down_strips(&f->adapted, &w->lora, r->route.active[s->active], strip * KT_STRIP,
                           strips);
    for (int64_t i = 0; i < b.number; i++) {
      const int64_t slot = kt_block_start(&b, i), count = kt_block_start(&b, i + 1) - slot;
      kt_weighted weighted = weighted_of(f, e, s->part, strip, strips, slot);
      f->product(&down, strip, strips, rows_at(f, t, g, slot), f->mid_stride, count, w->sums,
                 w->panel);
      kt_adapted_add_down(&f->adapted, &t->adapted, &w->lora, w->panel, strips, slot - g->slot,
                          count, w->sums);
      weighted.down = kt_sums_of(w->sums, count);
      serve(f, t, g, s->active, strip, strips, slot, count, NULL, w->plus, &weighted.down);
      f->epilogue->add_weighted(&weighted, 0, count);
    }
  }
}

/* Tokens of the smallest block of an expert. */
static int64_t smallest(const kt_forward_run *f, int64_t active) {
  const kt_blocks b = kt_expert_blocks(&f->run.route, active, f->most_tokens);
  return b.count / b.number;
}

void kt_down_step(kt_forward_run *f, kt_team *t, kt_worker *w, kt_group *g, int64_t part,
                  kt_cursor *cursor, const kt_place *then) {
  const int64_t all = f->run.moe->hidden / KT_STRIP;
  int64_t number;
  int more = kt_cursor_take(cursor, &number);
  while (more) {
    const int64_t first = number * f->down_strips, items = cursor->count + 1;
    const int64_t end = kt_smaller(all, first + items * f->down_strips);
    kt_place behind = *then;
    cursor->count = 0;
    more = kt_cursor_take(cursor, &number);
    if (more) behind = place_at(f, part, g->first, number * f->down_strips, all);
    for (int64_t a = g->first; a < g->end; a++) {
      const stretch s = {part, a, first, end};
      const kt_place next = a + 1 < g->end ? place_at(f, part, a + 1, first, end) : behind;
      if (kt_streams(f, smallest(f, a)))
        stream_stretch(f, t, w, g, &s, &next);
      else
        multiply_stretch(f, t, w, g, &s);
    }
  }
  kt_beside_finish(&w->beside);
}
