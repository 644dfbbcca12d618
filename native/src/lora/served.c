/* Adapters at inference: which slots have which, and their products. */
#include "served.h"

#include "../moe/rows.h"
#include "../simd/float_mode.h"

#include <math.h>
#include <string.h>

enum { LEAST_TOKENS = 4 /* from which on tiles are faster */ };

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
  return (kt_served){.adapters = a,
                     .math = kt_slab_math_best(),
                     .rank = kt_slabs(a->rank) * KT_SLAB_ROWS,
                     .cols = kt_ceil_div(a->rank, KT_SLAB_COLS) * KT_SLAB_COLS};
}

/* Rows of so many projections. */
static kt_served_rows take_rows(kt_arena *arena, const kt_served *s, int64_t slots,
                                int64_t projections) {
  const int64_t wide = s->math->strip ? slots + KT_SLAB_ROWS : 0;
  return (kt_served_rows){.values = kt_take(arena, slots * projections * s->rank, sizeof(float)),
                          .halves = kt_take(arena, wide * projections * s->cols, 2)};
}

void kt_take_served(kt_arena *arena, const kt_run *r, int64_t slots, kt_served *s) {
  if (!s->adapters) return;
  s->x = kt_take(arena, r->tokens * r->moe->hidden, sizeof *s->x);
  s->x_stride = (int64_t)kt_rows_stride(KT_ROWS_BF16, r->moe->hidden, 0);
  s->x_rows = kt_take(arena, s->math->pair ? r->tokens : 0, (size_t)s->x_stride);
  s->inner = take_rows(arena, s, slots, 2);
  s->order = kt_take(arena, slots, sizeof *s->order);
  s->segments = kt_take(arena, slots, sizeof *s->segments);
  s->start = kt_take(arena, kt_smaller(r->moe->experts, slots) + 1, sizeof *s->start);
  s->count = kt_take(arena, s->adapters->count, sizeof *s->count);
}

void kt_take_served_team(kt_arena *arena, const kt_served *s, int64_t slots, int64_t width,
                         kt_served_rows *rows) {
  if (!s->adapters) return;
  kt_served_rows taken = take_rows(arena, s, slots, 1);
  taken.middle = kt_take(arena, s->math->pair ? slots : 0, kt_rows_stride(KT_ROWS_BF16, width, 0));
  if (rows) *rows = taken;
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

static int are_many(const kt_served *s, int64_t slots) {
  return s->math->pair && slots >= LEAST_TOKENS;
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
  s->few = s->many = 0;
  for (int32_t i = 0; i < s->start[r->route.active_count]; i++) {
    if (check_pairs(r, s, s->segments + i) != KT_OK) return KT_ERR_ARGUMENT;
    *(are_many(s, s->segments[i].count) ? &s->many : &s->few) = 1;
  }
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

/* Products of A with the rows of slots of a segment, from column 2 * line on. What lies in the
 * order of slots begins with slot `before`. */
typedef struct narrow {
  int64_t cols, line, lines; /* of A; of which these are multiplied */
  const float *in;           /* rows `in_apart` floats apart, of few slots */
  const uint8_t *halves;     /* the same in bf16, `stride` bytes apart, of many */
  const int32_t *token;      /* rows are those of tokens; NULL: of slots */
  int64_t in_apart, stride, before, projections;
  kt_served_rows out;
} narrow;

/* A slab of the A of a projection, of which rows have the numbers in `place`. */
typedef struct slab_of {
  const kt_lora_pair *pair;
  int64_t place, slab;
} slab_of;

static int64_t row_of(const narrow *n, int64_t slot) {
  return n->token ? n->token[slot] : slot - n->before;
}

static const uint8_t *codes_of(const narrow *n, const slab_of *of) {
  const int64_t size = kt_slab_lines(n->cols) * KT_SLAB_LINE;
  return (const uint8_t *)of->pair->a + of->slab * size + n->line * KT_SLAB_LINE;
}

static float rounded(float value) { return kt_float((uint32_t)kt_bf16_bits(value) << 16); }

/* 16 sums of the slot at place `i` of the order; zeros where B's tiles read more than A has. */
static void store(const kt_served *s, const narrow *n, const slab_of *of, int64_t i,
                  const float *sums) {
  const int64_t first = of->slab * KT_SLAB_ROWS, row = i - n->before;
  const int64_t some = kt_smaller(KT_SLAB_ROWS, of->pair->rank - first);
  float *const out = n->out.values + (row * n->projections + of->place) * s->rank + first;
  for (int64_t r = 0; r < KT_SLAB_ROWS; r++)
    out[r] = r < some ? rounded(sums[r] * of->pair->scale) : 0.0f;
  if (!s->math->strip) return;
  uint16_t *const half = n->out.halves + (row * n->projections + of->place) * s->cols + first;
  for (int64_t r = 0; r < KT_SLAB_ROWS; r++) half[r] = (uint16_t)(kt_bits(out[r]) >> 16);
  if (first % KT_SLAB_COLS == 0 && first + KT_SLAB_ROWS >= of->pair->rank)
    memset(half + KT_SLAB_ROWS, 0, KT_SLAB_ROWS * sizeof *half);
}

static void multiply_many(const kt_served *s, const narrow *n, const slab_of *of, int64_t slabs,
                          int64_t first, int64_t count, float (*sums)[2][KT_SLAB_ROWS]) {
  const uint8_t *const codes[2] = {codes_of(n, of), slabs > 1 ? codes_of(n, of + 1) : NULL};
  const uint16_t *rows[KT_SLAB_TOKENS];
  for (int64_t i = 0; i < count; i++)
    rows[i] =
        (const uint16_t *)(const void *)(n->halves + row_of(n, s->order[first + i]) * n->stride);
  s->math->pair(codes, n->lines, rows, count, sums);
}

static void multiply_few(const kt_served *s, const narrow *n, const slab_of *of, int64_t slabs,
                         int64_t first, int64_t count, float (*sums)[2][KT_SLAB_ROWS]) {
  const float *rows[KT_SLAB_TOKENS];
  float *to[KT_SLAB_TOKENS];
  for (int64_t i = 0; i < count; i++)
    rows[i] = n->in + row_of(n, s->order[first + i]) * n->in_apart;
  for (int64_t j = 0; j < slabs; j++) {
    const kt_slabs_at at = {codes_of(n, of + j), 1, n->lines, 0};
    for (int64_t i = 0; i < count; i++) to[i] = sums[i][j];
    s->math->rows(&at, rows, count, to, 0);
  }
}

/* One slab or two, and slots from place `first` of the order on, which count as few or many. */
static void multiply_slots(const kt_served *s, const narrow *n, int many, const slab_of *of,
                           int64_t slabs, int64_t first, int64_t count) {
  float sums[KT_SLAB_TOKENS][2][KT_SLAB_ROWS];
  for (int64_t some; count; first += some, count -= some) {
    some = kt_smaller(count, KT_SLAB_TOKENS);
    (many ? multiply_many : multiply_few)(s, n, of, slabs, first, some, sums);
    for (int64_t i = 0; i < some; i++)
      for (int64_t j = 0; j < slabs; j++) store(s, n, of + j, first + i, sums[i][j]);
  }
}

/* Items are slabs of gate's A and of up's, of every segment. */
void kt_served_start(const kt_run *r, kt_served *s) {
  if (!s->adapters) return;
  const int32_t threads = kt_pool_threads(r->pool);
  const int64_t slabs = 2 * s->rank / KT_SLAB_ROWS;
  kt_share_init(&s->products, s->start[r->route.active_count] * slabs, 1, threads);
}

/* Slabs number .. of gate's A and behind them of up's: how many there are, up to two. */
static int64_t slabs_at(const kt_lora_pair *pairs, int64_t number, slab_of of[2]) {
  const int64_t gates = kt_slabs(pairs[KT_GATE].rank), ups = kt_slabs(pairs[KT_UP].rank);
  int64_t count = 0;
  for (; count < 2 && number < gates + ups; number++)
    of[count++] = number < gates ? (slab_of){pairs + KT_GATE, 0, number}
                                 : (slab_of){pairs + KT_UP, 1, number - gates};
  return count;
}

/* Where slots are many, of every other item, two slabs. */
static void multiply_item(const kt_run *r, const kt_served *s, int64_t item) {
  const int64_t each = 2 * s->rank / KT_SLAB_ROWS, hidden = r->moe->hidden;
  const kt_segment *const g = s->segments + item / each;
  const int many = are_many(s, g->count);
  const narrow n = {.cols = hidden,
                    .lines = hidden / 2,
                    .in = s->x,
                    .halves = s->x_rows,
                    .token = r->route.token,
                    .in_apart = hidden,
                    .stride = s->x_stride,
                    .projections = 2,
                    .out = s->inner};
  slab_of of[2];
  const int64_t slabs = slabs_at(pairs_of(r, s, g), item % each, of);
  if (slabs && (!many || item % each % 2 == 0))
    multiply_slots(s, &n, many, of, many ? slabs : 1, g->first, g->count);
}

void kt_served_row(const kt_run *r, const kt_served *s, int64_t token, const float *values) {
  if (!s->adapters) return;
  const int64_t hidden = r->moe->hidden;
  if (s->few) memcpy(s->x + token * hidden, values, (size_t)hidden * sizeof *values);
  if (s->many) kt_rows_quantize(KT_ROWS_BF16, hidden, 0, values, s->x_rows + token * s->x_stride);
}

void kt_served_inputs(kt_run *r, kt_served *s, int32_t thread) {
  if (!s->adapters) return;
  kt_barrier_wait(&r->all, thread);
  const uint64_t mode = kt_float_mode_flush();
  for (int64_t first, count; kt_share_take(&s->products, &first, &count);)
    for (int64_t i = first; i < first + count; i++) multiply_item(r, s, i);
  kt_float_mode_leave(mode);
  kt_barrier_wait(&r->all, thread);
}

/* Slots of a segment from place `first` on. */
static void multiply_middle(const kt_run *r, const kt_served *s, const kt_segment *g,
                            const narrow *n, float *middle, int64_t first, int64_t count) {
  const kt_lora_pair *const pair = pairs_of(r, s, g) + KT_DOWN;
  const int64_t slabs = kt_slabs(pair->rank);
  const int many = are_many(s, count);
  for (int64_t i = first; slabs && i < first + count; i++) {
    const int64_t at = row_of(n, s->order[i]);
    float *const row = middle + at * r->width;
    if (many)
      kt_rows_quantize(KT_ROWS_BF16, r->width, 0, row, n->out.middle + at * n->stride);
    else
      for (int64_t c = 0; c < r->width; c++) row[c] = rounded(row[c]);
  }
  for (int64_t i = 0; i < slabs; i += 2) {
    const slab_of of[2] = {{pair, 0, i}, {pair, 0, i + 1}};
    multiply_slots(s, n, many, of, kt_smaller(2, slabs - i), first, count);
  }
}

void kt_served_middle(const kt_run *r, const kt_served *s, int64_t part, int64_t active,
                      int64_t slot, int64_t count, int64_t before, float *middle,
                      const kt_served_rows *rows) {
  const narrow n = {.cols = r->moe->intermediate,
                    .line = part * r->width / 2,
                    .lines = r->width / 2,
                    .in = middle,
                    .halves = rows->middle,
                    .in_apart = r->width,
                    .stride = (int64_t)kt_rows_stride(KT_ROWS_BF16, r->width, 0),
                    .before = before,
                    .projections = 1,
                    .out = *rows};
  const uint64_t mode = kt_float_mode_flush();
  for (int32_t i = s->start[active]; i < s->start[active + 1]; i++) {
    int64_t first;
    const int64_t some = slots_within(s, s->segments + i, slot, slot + count, &first);
    if (some) multiply_middle(r, s, s->segments + i, &n, middle, first, some);
  }
  kt_float_mode_leave(mode);
}

/* ---- B ------------------------------------------------------------------------------ */

/* What the products of an item have in common. */
typedef struct wide {
  const kt_run *run;
  const kt_served *served;
  const kt_served_item *item;
  const kt_served_rows *rows;
  int64_t before, projections;
  float *plus;
} wide;

static int64_t row_of_place(const wide *w, int64_t place) {
  return (place - w->before) * w->projections + (w->item->projection == KT_UP);
}

static void spread_few(const wide *w, const kt_slabs_at *at, int64_t first, int64_t count) {
  const kt_served *const s = w->served;
  for (int64_t some; count; count -= some, first += some) {
    const float *in[KT_SLAB_TOKENS];
    float *to[KT_SLAB_TOKENS];
    some = kt_smaller(count, KT_SLAB_TOKENS);
    for (int64_t i = 0; i < some; i++) {
      in[i] = w->rows->values + row_of_place(w, first + i) * s->rank;
      to[i] = w->plus + (s->order[first + i] - w->item->slot) * KT_STRIP;
    }
    s->math->rows(at, in, some, to, w->item->count * KT_STRIP);
  }
}

/* Of slots of a segment from place `first` on. */
static void spread(const wide *w, const kt_lora_pair *pair, int64_t first, int64_t count,
                   kt_beside *beside) {
  const kt_served *const s = w->served;
  const int64_t lines = kt_slab_lines(pair->rank), size = lines * KT_SLAB_LINE;
  const kt_slabs_at at = {(const uint8_t *)pair->b + w->item->row / KT_SLAB_ROWS * size,
                          2 * w->item->strips, lines, size};
  if (beside && s->math->strip)
    s->math->strip(&at, (const uint8_t *)(w->rows->halves + row_of_place(w, first) * s->cols),
                   2 * w->projections * s->cols, s->order + first, count, (int32_t)w->item->slot,
                   beside, w->plus);
  else
    spread_few(w, &at, first, count);
}

void kt_served_products(const kt_run *r, const kt_served *s, const kt_served_item *item,
                        const kt_served_rows *rows, int64_t before, kt_beside *beside,
                        float *plus) {
  const int64_t projections = item->projection == KT_DOWN ? 1 : 2;
  const int64_t end = item->slot + item->count, all = item->strips * item->count * KT_STRIP;
  const wide w = {r, s, item, rows, before, projections, plus};
  const kt_segment *const own = s->segments + s->start[item->active];
  const int32_t segments = s->start[item->active + 1] - s->start[item->active];
  int64_t first, left = item->count;
  for (int32_t i = 0; i < segments; i++)
    if (pairs_of(r, s, own + i)[item->projection].rank)
      left -= slots_within(s, own + i, item->slot, end, &first);
  for (int64_t i = 0; left && i < all; i++) plus[i] = -0.0f;
  const uint64_t mode = kt_float_mode_flush();
  for (int32_t i = 0; i < segments; i++) {
    const kt_lora_pair *const pair = pairs_of(r, s, own + i) + item->projection;
    const int64_t some = slots_within(s, own + i, item->slot, end, &first);
    if (some && pair->rank) spread(&w, pair, first, some, beside);
  }
  kt_float_mode_leave(mode);
}
