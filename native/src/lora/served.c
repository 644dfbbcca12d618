/* Adapters at inference: which slots have which, and their products. */
#include "served.h"

#include <math.h>
#include <string.h>

/* ---- Arguments and memory ------------------------------------------------------ */

kt_status kt_check_adapters(const kt_adapters *a) {
  if (!a) return KT_OK;
  if (a->count < 1 || a->count > INT32_MAX || a->rank < 1 || a->rank > KT_MAX_RANK || !a->pair)
    return KT_ERR_ARGUMENT;
  const int good = kt_aligned(a->pair, sizeof(void *)) && kt_aligned(a->of_token, sizeof(int32_t));
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

kt_served kt_served_of(const kt_adapters *a) {
  if (!a) return (kt_served){.adapters = NULL};
  return (kt_served){
      .adapters = a, .add = kt_slabs_best(), .rank = kt_slabs(a->rank) * KT_SLAB_ROWS};
}

void kt_take_served(kt_arena *arena, const kt_run *r, int64_t slots, kt_served *s) {
  if (!s->adapters) return;
  s->x = kt_take(arena, r->tokens * r->moe->hidden, sizeof *s->x);
  s->inner = kt_take(arena, slots * 2 * s->rank, sizeof *s->inner);
  s->order = kt_take(arena, slots, sizeof *s->order);
  s->segments = kt_take(arena, slots, sizeof *s->segments);
  s->start = kt_take(arena, kt_smaller(r->moe->experts, slots) + 1, sizeof *s->start);
  s->count = kt_take(arena, s->adapters->count, sizeof *s->count);
}

/* ---- Segments -------------------------------------------------------------------- */

static int64_t adapter_of(const kt_run *r, const kt_served *s, int64_t slot) {
  const kt_adapters *const a = s->adapters;
  return a->of_token ? a->of_token[r->first_token + r->route.token[slot]] : a->all;
}

static const kt_lora_pair *pairs_of(const kt_run *r, const kt_served *s, const kt_segment *g) {
  return s->adapters->pair + (g->adapter * r->moe->experts + g->expert) * 3;
}

static int is_possible(const kt_served *s, const kt_lora_pair *pair) {
  if (pair->rank == 0) return 1;
  return pair->rank > 0 && pair->rank <= s->adapters->rank && pair->a && pair->b &&
         isfinite(pair->scale);
}

static kt_status check_pairs(const kt_run *r, const kt_served *s, const kt_segment *g) {
  const kt_lora_pair *const pair = pairs_of(r, s, g);
  const int gated = kt_has_gate(r->moe->activation.function);
  for (int p = 0; p < 3; p++)
    if (!is_possible(s, pair + p)) return KT_ERR_ARGUMENT;
  return gated || pair[KT_GATE].rank == 0 ? KT_OK : KT_ERR_ARGUMENT;
}

/* Sorts the slots of an expert by adapter; in each they stay in order. Returns the next segment. */
static int32_t sort_expert(const kt_run *r, kt_served *s, int64_t active, int32_t segment) {
  const int32_t first = r->route.start[active], end = r->route.start[active + 1];
  int32_t at = first;
  for (int32_t slot = first; slot < end; slot++) {
    const int64_t adapter = adapter_of(r, s, slot);
    if (adapter >= 0) s->count[adapter]++;
  }
  for (int32_t slot = first; slot < end; slot++) {
    const int64_t adapter = adapter_of(r, s, slot);
    if (adapter < 0) continue;
    if (s->count[adapter] > 0) { /* its first slot: from here on, minus where the next one goes */
      s->segments[segment++] =
          (kt_segment){r->route.active[active], (int32_t)adapter, at, s->count[adapter]};
      at += s->count[adapter];
      s->count[adapter] = -(at - s->segments[segment - 1].count) - 1;
    }
    s->order[-s->count[adapter]-- - 1] = slot;
  }
  for (int32_t slot = first; slot < end; slot++) {
    const int64_t adapter = adapter_of(r, s, slot);
    if (adapter >= 0) s->count[adapter] = 0;
  }
  return segment;
}

static kt_status check_tokens(const kt_run *r, const kt_served *s) {
  const kt_adapters *const a = s->adapters;
  if (!a->of_token) return a->all >= -1 && a->all < a->count ? KT_OK : KT_ERR_ARGUMENT;
  for (int64_t t = r->first_token; t < r->first_token + r->tokens; t++)
    if (a->of_token[t] < -1 || a->of_token[t] >= a->count) return KT_ERR_ARGUMENT;
  return KT_OK;
}

kt_status kt_served_batch(const kt_run *r, kt_served *s) {
  if (!s->adapters) return KT_OK;
  if (check_tokens(r, s) != KT_OK) return KT_ERR_ARGUMENT;
  memset(s->count, 0, (size_t)s->adapters->count * sizeof *s->count);
  s->start[0] = 0;
  for (int64_t a = 0; a < r->route.active_count; a++)
    s->start[a + 1] = sort_expert(r, s, a, s->start[a]);
  for (int32_t i = 0; i < s->start[r->route.active_count]; i++)
    if (check_pairs(r, s, s->segments + i) != KT_OK) return KT_ERR_ARGUMENT;
  return KT_OK;
}

/* ---- A x, and A h ------------------------------------------------------------------ */

/* The place of the first slot of a segment that is not below `slot`. */
static int64_t place_of(const kt_served *s, const kt_segment *g, int64_t slot) {
  int64_t from = g->first, to = g->first + g->count;
  while (from < to) {
    const int64_t middle = (from + to) / 2;
    if (s->order[middle] < slot)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

/* Slots of a segment among slot .. end - 1: *first is the place of the first. */
static int64_t slots_within(const kt_served *s, const kt_segment *g, int64_t slot, int64_t end,
                            int64_t *first) {
  *first = place_of(s, g, slot);
  return place_of(s, g, end) - *first;
}

/* Slab `n` of A times the rows of some slots, from column `line` * 2 on: scale times that goes to
 * columns 16 n ... of theirs in `out`, `apart` floats apart. */
typedef struct narrow {
  const kt_lora_pair *pair;
  int64_t cols, line, lines; /* of A; of which these are multiplied */
  const float *in, *(*row)(const struct narrow *narrow, int64_t slot);
  const int32_t *token;
  int64_t in_apart, before;
  float *out;
  int64_t out_apart;
} narrow;

static const float *row_of_token(const narrow *n, int64_t slot) {
  return n->in + n->token[slot] * n->in_apart;
}

static const float *row_of_slot(const narrow *n, int64_t slot) {
  return n->in + (slot - n->before) * n->in_apart;
}

/* Up to KT_SLAB_TOKENS slots. */
static void multiply_slab(const kt_served *s, const narrow *n, int64_t slab, const int32_t *slots,
                          int64_t count) {
  const int64_t size = kt_slab_lines(n->cols) * KT_SLAB_LINE, first = slab * KT_SLAB_ROWS;
  const int64_t some = kt_smaller(KT_SLAB_ROWS, n->pair->rank - first);
  const kt_slabs_at at = {(const uint8_t *)n->pair->a + slab * size + n->line * KT_SLAB_LINE, 1,
                          n->lines, 0};
  float sums[KT_SLAB_TOKENS][KT_SLAB_ROWS], *to[KT_SLAB_TOKENS] = {NULL};
  const float *rows[KT_SLAB_TOKENS] = {NULL};
  memset(sums, 0, (size_t)count * sizeof *sums);
  for (int64_t i = 0; i < count; i++) rows[i] = n->row(n, slots[i]), to[i] = sums[i];
  s->add(&at, rows, count, to, 0);
  for (int64_t i = 0; i < count; i++) {
    float *const out = n->out + (slots[i] - n->before) * n->out_apart + first;
    for (int64_t r = 0; r < some; r++) out[r] = sums[i][r] * n->pair->scale;
    for (int64_t r = some; r < KT_SLAB_ROWS; r++) out[r] = 0.0f; /* of an odd rank B reads one */
  }
}

static void multiply_slots(const kt_served *s, const narrow *n, int64_t slab, int64_t first,
                           int64_t count) {
  for (int64_t i = 0; i < count; i += KT_SLAB_TOKENS)
    multiply_slab(s, n, slab, s->order + first + i, kt_smaller(KT_SLAB_TOKENS, count - i));
}

/* Items are slabs of gate's A and of up's, of every segment. */
void kt_served_start(const kt_run *r, kt_served *s) {
  if (!s->adapters) return;
  const int32_t threads = kt_pool_threads(r->pool);
  const int64_t slabs = 2 * s->rank / KT_SLAB_ROWS;
  kt_share_init(&s->rows, r->tokens, 1, threads);
  kt_share_init(&s->products, s->start[r->route.active_count] * slabs, 1, threads);
}

static void multiply_item(const kt_run *r, const kt_served *s, int64_t item) {
  const int64_t each = s->rank / KT_SLAB_ROWS, slab = item % each;
  const kt_segment *const g = s->segments + item / (2 * each);
  const kt_projection p = item / each % 2 ? KT_UP : KT_GATE;
  const int64_t hidden = r->moe->hidden;
  const narrow n = {.pair = pairs_of(r, s, g) + p,
                    .cols = hidden,
                    .lines = hidden / 2,
                    .in = s->x,
                    .row = row_of_token,
                    .token = r->route.token,
                    .in_apart = hidden,
                    .out = s->inner + (p == KT_UP ? s->rank : 0),
                    .out_apart = 2 * s->rank};
  if (slab < kt_slabs(n.pair->rank)) multiply_slots(s, &n, slab, g->first, g->count);
}

void kt_served_inputs(kt_run *r, kt_served *s, int32_t thread, const kt_matrix *x) {
  if (!s->adapters) return;
  kt_decode_rows_fn *const read = kt_decode_rows_best();
  const int64_t hidden = r->moe->hidden;
  for (int64_t first, count; kt_share_take(&s->rows, &first, &count);)
    for (int64_t t = first; t < first + count; t++)
      read(x, r->first_token + t, 1, s->x + t * hidden, hidden);
  kt_barrier_wait(&r->all, thread);
  for (int64_t first, count; kt_share_take(&s->products, &first, &count);)
    for (int64_t i = first; i < first + count; i++) multiply_item(r, s, i);
  kt_barrier_wait(&r->all, thread);
}

void kt_served_middle(const kt_run *r, const kt_served *s, int64_t part, int64_t active,
                      int64_t slot, int64_t count, int64_t before, const float *middle,
                      float *rows) {
  for (int32_t i = s->start[active]; i < s->start[active + 1]; i++) {
    const kt_segment *const g = s->segments + i;
    const narrow n = {.pair = pairs_of(r, s, g) + KT_DOWN,
                      .cols = r->moe->intermediate,
                      .line = part * r->width / 2,
                      .lines = r->width / 2,
                      .in = middle,
                      .row = row_of_slot,
                      .in_apart = r->width,
                      .before = before,
                      .out = rows,
                      .out_apart = s->rank};
    int64_t first;
    const int64_t some = slots_within(s, g, slot, slot + count, &first);
    for (int64_t slab = 0; some && slab < kt_slabs(n.pair->rank); slab++)
      multiply_slots(s, &n, slab, first, some);
  }
}

/* ---- B ------------------------------------------------------------------------------ */

static void add_segment(const kt_run *r, const kt_served *s, const kt_segment *g,
                        const kt_served_item *item, const float *rows, int64_t before, float *out) {
  const int down = item->projection == KT_DOWN;
  const kt_lora_pair *const pair = pairs_of(r, s, g) + item->projection;
  const int64_t lines = kt_slab_lines(pair->rank), size = lines * KT_SLAB_LINE;
  const int64_t apart = down ? s->rank : 2 * s->rank,
                side = item->projection == KT_UP ? s->rank : 0;
  const kt_slabs_at at = {(const uint8_t *)pair->b + item->row / KT_SLAB_ROWS * size,
                          2 * item->strips, lines, size};
  int64_t first, left = slots_within(s, g, item->slot, item->slot + item->count, &first);
  if (pair->rank == 0) return;
  for (int64_t some; left; left -= some, first += some) {
    const float *in[KT_SLAB_TOKENS];
    float *to[KT_SLAB_TOKENS];
    some = kt_smaller(left, KT_SLAB_TOKENS);
    for (int64_t i = 0; i < some; i++) {
      const int64_t slot = s->order[first + i];
      in[i] = rows + (slot - before) * apart + side;
      to[i] = out + (slot - item->slot) * KT_STRIP;
    }
    s->add(&at, in, some, to, item->count * KT_STRIP);
  }
}

void kt_served_add(const kt_run *r, const kt_served *s, const kt_served_item *item,
                   const float *rows, int64_t before, float *out) {
  for (int32_t i = s->start[item->active]; i < s->start[item->active + 1]; i++)
    add_segment(r, s, s->segments + i, item, rows, before, out);
}
