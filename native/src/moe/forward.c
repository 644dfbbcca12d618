/* The MoE forward: one job of the pool per batch of up to KT_BATCH tokens.
 *
 * In a team (run.h):
 *   1  x as activation rows of the format           items: tokens
 * and, for one group of experts after the other (steps.h), between barriers:
 *   2  gate and up products, activation -> middle   items: (expert, tokens, strips of w)
 *   3  middle as activation rows                    items: slots
 *   4  down products, weighted sum -> partial       items: strips of hidden
 * and then all teams together:
 *   5  y = add + sum of the parts                   items: tokens
 *
 * LoRA (train/adapted.h) has a step of its own behind 1, A x, computes A h within 3, and adds the
 * products of B to those of 2 and 4 while they are in cache. Adapters at inference (lora/served.h)
 * do the same at the same places. */
#include "forward.h"

#include "../cpu.h"
#include "../simd/float_mode.h"
#include "rows.h"
#include "steps.h"

#include <string.h>

enum {
  LINE = 64,
  GROUP_SLOTS = 32,            /* of a group, per thread, at least */
  GROUP_EXPERTS = 2,           /* per thread, of a group with so many slots ... */
  GROUP_SIZE = 384 * 1024,     /* ... unless its middle has so many bytes, per thread */
  BLOCK_SIZE = 1024 * 1024,    /* bytes of activation rows of a streamed block, which stay in L2 */
  SUMS = 4 * KT_STREAM_TOKENS, /* of 32 rows, of a thread */
  BLOCK_STEP = 32,             /* tokens */
  APART = KT_STRIP,            /* floats between rows of y, which else lie whole pages apart, in the
                                  same few lines of L1 */
  DOWN_RUNS = 8                /* of a thread's share of the second step, about */
};

/* ---- Scratch -------------------------------------------------------------- */

static void lay_out_team(kt_arena *a, const kt_forward_run *f, kt_team *t, int64_t slots) {
  uint8_t *x_rows = kt_take(a, f->run.tokens, (size_t)f->x_stride);
  float *middle = kt_take(a, slots * f->run.width, sizeof *middle);
  uint8_t *mid_rows = kt_take(a, slots, (size_t)f->mid_stride);
  if (t) t->x_rows = x_rows, t->middle = middle, t->mid_rows = mid_rows;
  kt_take_adapted_team(a, &f->run, &f->adapted, slots, t ? &t->adapted : NULL);
  kt_take_served_team(a, &f->served, slots, f->run.width, t ? &t->served : NULL);
}

_Static_assert(2 * KT_MAX_PRODUCTS <= SUMS, "sums of products in calls have room");

static void lay_out_worker(kt_arena *a, const kt_forward_run *f, kt_worker *w) {
  const int64_t most = kt_larger(KT_MAX_TOKENS, f->most_tokens);
  uint8_t *const gather = kt_take(a, most, (size_t)f->x_stride);
  float *const sums = kt_take(a, SUMS * KT_STRIP, sizeof(float));
  float *const plus = kt_take(a, f->served.adapters ? SUMS * KT_STRIP : 0, sizeof(float));
  uint8_t *const panel = kt_take(a, 1, KT_PANEL_SIZE);
  uint8_t *const ring = kt_take(a, 1, KT_BESIDE_RING + KT_BESIDE_SPARE);
  float *const values = kt_take(a, f->run.moe->hidden, sizeof(float));
  if (w)
    *w = (kt_worker){.gather = gather,
                     .sums = sums,
                     .plus = plus,
                     .panel = panel,
                     .values = values,
                     .gathered = -1,
                     .beside = kt_beside_of(ring, ring + KT_BESIDE_RING),
                     .activate = f->activate,
                     .activation = &f->run.moe->activation,
                     .epilogue = f->epilogue,
                     .math = f->adapted.adapter.math};
  kt_take_lora_worker(a, &f->run, &f->adapted.adapter, w ? &w->lora : NULL);
}

/* Threads of a team, on average, at least 1: groups are those of all. */
static int64_t team_size(const kt_run *r) {
  return kt_larger(1, kt_pool_threads(r->pool) / r->team_count);
}

static int64_t most_groups(const kt_run *r, int64_t slots) {
  const int64_t full = slots / (team_size(r) * GROUP_SLOTS);
  return kt_smaller(kt_smaller(r->moe->experts, slots), full + 1);
}

/* Threads of the largest team: each part has shares of so many. */
static int64_t most_threads(const kt_run *r) {
  int64_t threads = 1;
  for (int64_t t = 0; t < r->team_count; t++) threads = kt_larger(threads, kt_team_threads(r, t));
  return threads;
}

static void lay_out_groups(kt_arena *a, kt_forward_run *f, int64_t part, int64_t slots, int there) {
  const int64_t threads = most_threads(&f->run), most = most_groups(&f->run, slots);
  kt_group *const groups = kt_take(a, most, sizeof *groups);
  kt_share *const shares = kt_take(a, most * 3 * threads, sizeof *shares);
  for (int64_t i = 0; there && i < most; i++) {
    kt_share *const own = shares + i * 3 * threads;
    groups[i] = (kt_group){.inner = own, .middle = own + threads, .down = own + 2 * threads};
  }
  if (there) f->parts[part].groups = groups;
}

/* What all teams use. */
static void lay_out_shared(kt_arena *a, kt_forward_run *f, int64_t slots) {
  kt_run *const r = &f->run;
  kt_take_route(a, &r->route, r->moe->experts, slots);
  f->teams = kt_take(a, r->team_count, sizeof *f->teams);
  f->parts = kt_take(a, r->moe->parts, sizeof *f->parts);
  f->partials = kt_take(a, r->moe->parts, sizeof *f->partials);
  f->workers = kt_take(a, kt_pool_threads(r->pool), sizeof *f->workers);
  kt_take_adapted(a, r, slots, &f->adapted);
  kt_take_served(a, r, slots, &f->served);
}

/* Of a team: first what the caller writes to before each job, then what the team's threads write to
 * before others read it. */
static void lay_out_region(kt_arena *a, kt_forward_run *f, int64_t index, int64_t slots,
                           int there) {
  const kt_run *const r = &f->run;
  const int32_t threads = kt_team_threads(r, index), first = kt_first_thread(r, index);
  const int64_t part = kt_first_part(r, index), end = kt_first_part(r, index + 1);
  kt_team *const team = kt_take(a, 1, sizeof *team);
  kt_worker *const workers = kt_take(a, threads, sizeof *workers);
  for (int64_t p = part; p < end; p++) lay_out_groups(a, f, p, slots, there);
  if (there) f->teams[index] = team;
  lay_out_team(a, f, there ? team : NULL, slots);
  for (int32_t i = 0; i < threads; i++) {
    if (there) f->workers[first + i] = workers + i;
    lay_out_worker(a, f, there ? workers + i : NULL);
  }
  for (int64_t p = part; p < end; p++) {
    float *const partial = kt_take(a, r->tokens * f->partial_stride, sizeof *partial);
    if (there) f->parts[p].partial = partial, f->partials[p] = partial;
  }
}

/* All pointers of `f` for batches of up to f->run.tokens. Returns the bytes used. `size`: of the
 * memory, if there is some. */
static size_t lay_out(kt_forward_run *f, void *memory, size_t size) {
  const int64_t slots = f->run.tokens * f->run.top_k;
  size_t most = 0;
  f->partial_stride = f->run.moe->hidden + APART;
  for (int64_t index = 0; index < f->run.team_count; index++) {
    kt_arena a = kt_team_arena(&f->run, memory, size, index);
    if (index == 0) lay_out_shared(&a, f, slots);
    lay_out_region(&a, f, index, slots, memory != NULL);
    if (a.used > most) most = a.used;
  }
  return kt_teams_size(&f->run, most);
}

/* ---- Steps of a team ------------------------------------------------------ */

static void make_x_rows(const kt_forward_run *f, kt_team *t, kt_worker *w) {
  const int64_t hidden = f->run.moe->hidden;
  for (int64_t first, count; kt_share_take(&t->rows, &first, &count);)
    for (int64_t token = first; token < first + count; token++) {
      f->read(&f->x, f->run.first_token + token, 1, w->values, hidden);
      kt_rows_quantize(f->rows_kind, hidden, f->run.moe->layout.group, w->values,
                       t->x_rows + token * f->x_stride);
      if (t == f->teams[0]) kt_served_row(&f->run, &f->served, token, w->values);
    }
}

static void make_mid_row(const kt_forward_run *f, const kt_team *t, const kt_group *g, int64_t part,
                         int64_t slot) {
  const int64_t width = f->run.width, at = slot - g->slot;
  const float *const middle = t->middle + at * width;
  uint8_t *const row = t->mid_rows + at * f->mid_stride;
  kt_rows_quantize(f->rows_kind, width, f->run.moe->layout.group, middle, row);
  kt_adapted_middle(&f->adapted, &f->run, &t->adapted, part, slot, g->slot, middle, row);
}

static void make_mid_rows(kt_forward_run *f, kt_team *t, kt_worker *w, kt_group *g, int64_t part) {
  kt_cursor cursor = kt_cursor_of(g->middle, t->threads, w->rank);
  for (int64_t i; kt_cursor_take(&cursor, &i);) make_mid_row(f, t, g, part, g->slot + i);
}

/* With LoRA of down: also A h, of some slots of an expert. */
static void make_down_rows(kt_forward_run *f, kt_team *t, kt_worker *w, kt_group *g, int64_t part) {
  /* The team's rows of the middle; only looked at where they are bf16. */
  const kt_rows_view own = {
      .rows = t->mid_rows, .before = g->slot, .stride = f->mid_stride, .cols = f->run.width};
  kt_beside_leave(&w->beside); /* products of A have tiles of their own */
  kt_cursor cursor = kt_cursor_of(g->middle, t->threads, w->rank);
  for (int64_t i; kt_cursor_take(&cursor, &i);) {
    const int64_t active = g->first + i / g->pieces, piece = i % g->pieces;
    const int64_t start = f->run.route.start[active];
    const int64_t all = f->run.route.start[active + 1] - start;
    const int64_t slot = start + all * piece / g->pieces;
    const int64_t count = start + all * (piece + 1) / g->pieces - slot;
    for (int64_t k = slot; k < slot + count; k++) make_mid_row(f, t, g, part, k);
    if (count && kt_adapts(&f->adapted.adapter, KT_DOWN))
      kt_adapted_down_rows(&f->adapted, &f->run, &t->adapted, &w->lora, &own, w->panel, part,
                           active, slot, count);
    if (count && f->served.adapters)
      kt_served_middle(&f->run, &f->served, part, active, slot, count, g->slot, t->middle,
                       &t->served);
  }
}

/* Each step knows what the thread multiplies with after it. What a group's last step reads, the
 * next group's first does not write, and its second comes behind a barrier. */
static void compute_part(kt_forward_run *f, kt_team *t, kt_worker *w, int64_t part) {
  kt_group *const groups = f->parts[part].groups;
  kt_cursor inner = kt_cursor_of(groups->inner, t->threads, w->rank);
  for (kt_group *g = groups; g < groups + f->groups; g++) {
    kt_cursor down = kt_cursor_of(g->down, t->threads, w->rank), later = {.number = 0};
    kt_place next = {.strips = 0};
    if (kt_cursor_refill(&down)) next = kt_down_place(f, g, part, down);
    kt_inner_step(f, t, w, g, part, &inner, &next);
    kt_barrier_wait(&t->barrier, w->rank);
    if (g->pieces)
      make_down_rows(f, t, w, g, part);
    else
      make_mid_rows(f, t, w, g, part);
    kt_barrier_wait(&t->barrier, w->rank);
    next.strips = 0;
    if (g + 1 < groups + f->groups) {
      later = kt_cursor_of(g[1].inner, t->threads, w->rank);
      if (kt_cursor_refill(&later)) next = kt_inner_place(f, t, g + 1, part, later);
    }
    kt_down_step(f, t, w, g, part, &down, &next);
    inner = later;
  }
}

static void finish(kt_forward_run *f, kt_worker *w) {
  const int64_t hidden = f->run.moe->hidden;
  for (int64_t first, count; kt_share_take(&f->finish, &first, &count);)
    for (int64_t i = first; i < first + count; i++) {
      const int64_t token = f->run.first_token + i;
      for (int64_t p = 0; !f->run.route.used[i] && p < f->run.moe->parts; p++)
        memset(f->parts[p].partial + i * f->partial_stride, 0, (size_t)hidden * sizeof(float));
      f->epilogue->sum(f->partials, f->run.moe->parts, i * f->partial_stride,
                       f->add ? f->add + token * hidden : NULL, hidden, w->values);
      kt_rows_store(f->y_dtype, w->values, hidden, f->y + (size_t)token * f->y_size);
    }
}

/* ---- The job --------------------------------------------------------------- */

/* The team's rows of x; only looked at where they are bf16. */
static kt_rows_view x_rows(const kt_forward_run *f, const kt_team *t) {
  return (kt_rows_view){.rows = t->x_rows,
                        .stride = f->x_stride,
                        .cols = f->run.moe->hidden,
                        .index = f->run.route.token};
}

static void forward_job(void *context, int32_t thread) {
  kt_forward_run *f = context;
  const uint64_t mode = kt_float_mode_enter();
  const int64_t index = kt_team_of(&f->run, thread);
  kt_team *t = f->teams[index];
  kt_worker *w = f->workers[thread];
  w->rank = kt_team_rank(&f->run, thread);
  make_x_rows(f, t, w);
  kt_barrier_wait(&t->barrier, w->rank);
  const kt_rows_view own = x_rows(f, t);
  kt_adapted_inputs(&f->run, &f->adapted, thread, &w->lora, &f->x, &own, w->values, w->panel);
  kt_served_inputs(&f->run, &f->served, thread);
  for (int64_t part = kt_first_part(&f->run, index);
       f->groups && part < kt_first_part(&f->run, index + 1); part++)
    compute_part(f, t, w, part);
  kt_beside_leave(&w->beside);
  kt_barrier_wait(&f->run.all, thread);
  finish(f, w);
  kt_float_mode_leave(mode);
}

/* Pieces of each expert's slots, of which the largest is no more than a thread's even part. */
static int64_t pieces_of(const kt_route *route, int64_t first, int64_t end, int64_t threads) {
  const int64_t slots = route->start[end] - route->start[first];
  int64_t largest = 0;
  for (int64_t a = first; a < end; a++)
    largest = kt_larger(largest, route->start[a + 1] - route->start[a]);
  return kt_smaller(largest, kt_ceil_div(threads * largest, slots));
}

/* Whether a group is not to have more experts. */
static int is_full(const kt_run *r, int64_t experts, int64_t slots, int64_t threads) {
  const int64_t size = slots * r->width * (int64_t)sizeof(float);
  return slots >= threads * GROUP_SLOTS &&
         (experts >= threads * GROUP_EXPERTS || size >= threads * GROUP_SIZE);
}

/* The group that begins with active[first]. */
static void begin_group(const kt_forward_run *f, int64_t first, int64_t threads, kt_group *g) {
  const kt_route *const route = &f->run.route;
  int64_t end = first + 1;
  while (end < route->active_count &&
         !is_full(&f->run, end - first, route->start[end] - route->start[first], threads))
    end++;
  g->first = first, g->end = end, g->slot = route->start[first];
  const int adapts = kt_adapts(&f->adapted.adapter, KT_DOWN) || f->served.adapters;
  g->pieces = adapts ? pieces_of(route, first, end, threads) : 0;
}

/* Items of a step in equal shares; the runs of one have `grain` items at least. */
static void share_out(kt_share *shares, int64_t threads, int64_t items, int64_t grain) {
  for (int64_t i = 0; i < threads; i++)
    kt_share_init_range(shares + i, items * i / threads, items * (i + 1) / threads, grain, 1);
}

static void prepare_part(kt_forward_run *f, const kt_team *t, int64_t part) {
  const kt_route *const route = &f->run.route;
  const int64_t threads = t->threads, down = kt_down_items(f);
  f->groups = 0;
  for (int64_t first = 0; first < route->active_count;) {
    kt_group *const g = f->parts[part].groups + f->groups++;
    begin_group(f, first, team_size(&f->run), g);
    first = g->end;
    const int64_t slots = route->start[g->end] - g->slot;
    share_out(g->inner, threads, kt_inner_items(f, t, g), 1);
    share_out(g->middle, threads, g->pieces ? (g->end - g->first) * g->pieces : slots, 1);
    share_out(g->down, threads, down, threads > 1 ? down / (DOWN_RUNS * threads) : down);
  }
}

static void prepare_team(kt_forward_run *f, int64_t index) {
  const kt_run *const r = &f->run;
  kt_team *const t = f->teams[index];
  const int32_t threads = kt_team_threads(r, index);
  t->threads = threads;
  kt_barrier_init(&t->barrier, threads);
  kt_share_init(&t->rows, r->tokens, 1, threads);
  for (int64_t part = kt_first_part(r, index); part < kt_first_part(r, index + 1); part++)
    prepare_part(f, t, part);
}

static kt_status forward_batch(kt_forward_run *f) {
  kt_run *const r = &f->run;
  const int32_t threads = kt_pool_threads(r->pool);
  const int64_t largest = kt_largest_block(&r->route);
  f->down_strips = kt_streams(f, largest)
                       ? 1
                       : kt_strips_per_item(r->moe->hidden / KT_STRIP, team_size(r), largest);
  f->down_together = kt_down_together(r);
  kt_barrier_init(&r->all, threads);
  kt_share_init(&f->finish, r->tokens, 1, threads);
  kt_adapted_start(r, &f->adapted);
  kt_served_start(r, &f->served);
  for (int64_t index = 0; index < r->team_count; index++) prepare_team(f, index);
  return kt_pool_run(r->pool, forward_job, f);
}

/* ---- Entry points ----------------------------------------------------------- */

int kt_moe_has_kernels(const kt_layout *layout, int isa) {
  const kt_weight_format *format = kt_format_of(layout);
  if (!format || !format->product[KT_ISA_SCALAR]) return 0;
  return kt_isa_has_cell(isa, format->product, sizeof *format->product) ||
         kt_isa_has_cell(isa, kt_epilogues, sizeof *kt_epilogues);
}

/* Tokens of a streamed block: whole halves of tiles, or one. */
static int64_t block_tokens(int64_t stride) {
  const int64_t most = BLOCK_SIZE / stride / BLOCK_STEP * BLOCK_STEP;
  return kt_larger(KT_MAX_TOKENS, kt_smaller(most, KT_STREAM_TOKENS));
}

static kt_forward_run start(const kt_moe *moe, kt_low_rank low_rank, int saves, const kt_pool *pool,
                            int64_t tokens, int64_t top_k) {
  const kt_lora *const lora = low_rank.lora;
  const kt_epilogue *epilogue = KT_CELL(kt_epilogues);
  kt_forward_run f = {
      .run = kt_run_of(moe, pool, tokens, top_k),
      .epilogue = epilogue,
      .activate = epilogue->activate[moe->activation.function],
  };
  if (lora || saves) f.adapted.adapter = kt_adapter_of(moe, lora);
  f.served = kt_served_of(low_rank.adapters);
  f.product = kt_format_product(f.run.format);
  const kt_rounded *const rounded = lora ? kt_rounded_best(&moe->layout) : NULL;
  f.rows_kind = rounded ? KT_ROWS_BF16 : f.run.format->rows_kind;
  f.x_stride = (int64_t)kt_rows_stride(f.rows_kind, moe->hidden, moe->layout.group);
  f.mid_stride = (int64_t)kt_rows_stride(f.rows_kind, f.run.width, moe->layout.group);
  f.adapted.saves = saves;
  /* Products of B go beside a stream only where they have a stream of their own. */
  const int beside = !(lora || saves) || f.adapted.adapter.add_beside;
  f.stream = beside ? kt_format_stream(f.run.format) : NULL;
  f.least_tokens = kt_least_streamed(&moe->layout);
  if (rounded) f.stream = rounded->stream, f.least_tokens = 1;
  f.most_tokens = f.stream ? block_tokens(f.x_stride) : KT_MAX_TOKENS;
  return f;
}

size_t kt_forward_scratch_size(const kt_moe *moe, kt_low_rank low_rank, int64_t tokens,
                               int64_t top_k, const kt_pool *pool) {
  kt_forward_run f = start(moe, low_rank, 0, pool, tokens, top_k);
  return lay_out(&f, NULL, 0);
}

size_t kt_moe_scratch_size(const kt_moe *moe, int64_t tokens, int64_t top_k, const kt_pool *pool) {
  if (!pool || kt_check_layer(moe) != KT_OK || kt_check_batch(moe, tokens, top_k) != KT_OK)
    return 0;
  return kt_forward_scratch_size(moe, (kt_low_rank){NULL, NULL}, tokens, top_k, pool);
}

static kt_status check_outputs(const kt_moe_call *c) {
  const size_t size = kt_value_size(c->y_dtype);
  const int good = c->y && size && kt_aligned(c->y, size) && kt_aligned(c->add, sizeof(float));
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

static void start_call(kt_forward_run *f, const kt_moe_call *c, void *saved) {
  const kt_moe *const moe = f->run.moe;
  f->read = kt_decode_rows_best();
  f->x = kt_run_values(moe, c->x, c->tokens, c->x_dtype);
  f->add = c->add, f->y = c->y, f->y_dtype = c->y_dtype;
  f->y_size = (size_t)moe->hidden * kt_value_size(c->y_dtype);
  if (saved) kt_saved_at(moe, &f->adapted.adapter, c->tokens * c->top_k, saved, &f->adapted.saved);
  if (saved) kt_adapted_cuts(&f->adapted, &moe->activation);
  kt_run_skip(&f->run, c);
}

static kt_status each_batch(kt_forward_run *f, const kt_moe_call *c,
                            kt_status (*step)(kt_forward_run *)) {
  kt_status status = KT_OK;
  for (int64_t first = 0; first < c->tokens && status == KT_OK; first += KT_BATCH) {
    kt_run_batch(&f->run, c, first);
    status = kt_served_batch(&f->run, &f->served);
    if (status == KT_OK) status = step(f);
  }
  return status;
}

static kt_status check_batch_experts(kt_forward_run *f) { return kt_check_experts(&f->run); }

kt_status kt_forward(const kt_moe *moe, kt_low_rank low_rank, kt_pool *pool,
                     const kt_moe_call *call, void *saved, void *scratch, size_t scratch_size) {
  const kt_status status = pool ? kt_check_layer(moe) : KT_ERR_ARGUMENT;
  if (status != KT_OK) return status;
  if (!call || kt_check_batch(moe, call->tokens, call->top_k) != KT_OK) return KT_ERR_ARGUMENT;
  if (call->tokens == 0) return KT_OK;
  if (kt_check_inputs(call) != KT_OK || check_outputs(call) != KT_OK || !scratch ||
      !kt_aligned(scratch, LINE) || !kt_aligned(saved, LINE))
    return KT_ERR_ARGUMENT;
  kt_forward_run f = start(moe, low_rank, saved != NULL, pool, call->tokens, call->top_k);
  if (scratch_size < kt_forward_scratch_size(moe, low_rank, call->tokens, call->top_k, pool))
    return KT_ERR_SCRATCH;
  lay_out(&f, scratch, scratch_size);
  start_call(&f, call, saved);
  /* All is checked before y is written, of which x or add may be a part. */
  const kt_status good = each_batch(&f, call, check_batch_experts);
  return good == KT_OK ? each_batch(&f, call, forward_batch) : good;
}

kt_status kt_moe_forward(const kt_moe *moe, kt_pool *pool, const kt_moe_call *call, void *scratch,
                         size_t scratch_size) {
  return kt_forward(moe, (kt_low_rank){NULL, NULL}, pool, call, NULL, scratch, scratch_size);
}

/* ---- Adapters at inference --------------------------------------------------- */

size_t kt_adapted_scratch_size(const kt_moe *moe, const kt_adapters *adapters, int64_t tokens,
                               int64_t top_k, const kt_pool *pool) {
  if (!pool || kt_check_layer(moe) != KT_OK || kt_check_batch(moe, tokens, top_k) != KT_OK ||
      kt_check_adapters(adapters) != KT_OK)
    return 0;
  return kt_forward_scratch_size(moe, (kt_low_rank){NULL, adapters}, tokens, top_k, pool);
}

kt_status kt_adapted_forward(const kt_moe *moe, const kt_adapters *adapters, kt_pool *pool,
                             const kt_moe_call *call, void *scratch, size_t scratch_size) {
  if (kt_check_adapters(adapters) != KT_OK) return KT_ERR_ARGUMENT;
  return kt_forward(moe, (kt_low_rank){NULL, adapters}, pool, call, NULL, scratch, scratch_size);
}
