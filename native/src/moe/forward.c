/* The MoE forward: one job of the pool per batch of up to KT_BATCH tokens.
 *
 * In a team (run.h), between barriers:
 *   1  x as activation rows of the format           items: tokens
 *   2  gate and up products, activation -> middle   items: (expert, strips of w)
 *   3  middle as activation rows                    items: slots
 *   4  down products, weighted sum -> partial       items: strips of hidden, all experts
 * and then all teams together:
 *   5  y = add + sum of the parts                   items: tokens
 *
 * In 4 a thread owns columns of y for all experts, so sums run in a fixed order without
 * atomics or copies. LoRA (train/adapted.h) has two steps of its own, A x behind 1 and A h behind
 * 3, and adds the products of B to those of 2 and 4 while they are in cache. */
#include "forward.h"

#include "../cpu.h"
#include "../simd/float_mode.h"
#include "../train/adapted.h"
#include "rows.h"

#include <string.h>

enum { LINE = 64 };

/* What one part of the layer needs while it is computed. */
typedef struct part_work {
  kt_share gate_up, middle, products, down;
  float *partial; /* [tokens, hidden] */
} part_work;

typedef struct team {
  kt_barrier barrier;
  kt_share rows;
  uint8_t *x_rows;   /* [tokens] activation rows of x */
  float *middle;     /* [slots, w] */
  uint8_t *mid_rows; /* [slots] activation rows of the middle */
  kt_adapted_team adapted;
} team;

/* Memory of one thread. `gathered` remembers which rows lie in `gather`. */
typedef struct worker {
  uint8_t *gather;  /* [KT_MAX_TOKENS] activation rows of x */
  float *gate, *up; /* [KT_MAX_PRODUCTS][KT_STRIP] */
  uint8_t *panel;   /* KT_PANEL_SIZE */
  float *values;    /* one row of x or y as binary32 */
  int64_t gathered; /* first slot, or -1 */
  kt_lora_worker lora;
} worker;

typedef struct forward {
  kt_run run;
  const kt_epilogue *epilogue;
  kt_product_fn *product;
  kt_activate_fn *activate;
  kt_share finish;
  team *teams;
  part_work *parts;
  worker *workers;
  int64_t gate_up_strips, down_strips; /* per item */
  int64_t x_stride, mid_stride, partial_size;
  kt_decode_rows_fn *read;
  kt_matrix x; /* of the whole call, to be rounded to bf16 */
  const float *add;
  uint8_t *y;
  size_t y_size; /* bytes of a row */
  int y_dtype;
  kt_adapted adapted;
} forward;

/* ---- Scratch -------------------------------------------------------------- */

static void lay_out_team(kt_arena *a, const forward *f, team *t, int64_t slots) {
  uint8_t *x_rows = kt_take(a, f->run.tokens, (size_t)f->x_stride);
  float *middle = kt_take(a, slots * f->run.width, sizeof *middle);
  uint8_t *mid_rows = kt_take(a, slots, (size_t)f->mid_stride);
  if (t) t->x_rows = x_rows, t->middle = middle, t->mid_rows = mid_rows;
  kt_take_adapted_team(a, &f->run, &f->adapted, slots, t ? &t->adapted : NULL);
}

static void lay_out_worker(kt_arena *a, const forward *f, worker *w) {
  const int64_t products = KT_MAX_PRODUCTS * KT_STRIP;
  const worker laid = {
      .gather = kt_take(a, KT_MAX_TOKENS, (size_t)f->x_stride),
      .gate = kt_take(a, products, sizeof(float)),
      .up = kt_take(a, products, sizeof(float)),
      .panel = kt_take(a, 1, KT_PANEL_SIZE),
      .values = kt_take(a, f->run.moe->hidden, sizeof(float)),
      .gathered = -1,
  };
  if (w) *w = laid;
  kt_take_lora_worker(a, &f->run, &f->adapted.adapter, w ? &w->lora : NULL);
}

/* All pointers of `f` for batches of up to f->run.tokens. Returns the bytes used. */
static size_t lay_out(forward *f, uint8_t *memory) {
  kt_arena a = {memory, 0};
  kt_run *const r = &f->run;
  const int64_t threads = kt_pool_threads(r->pool), slots = r->tokens * r->top_k;
  kt_take_route(&a, &r->route, r->moe->experts, slots);
  f->teams = kt_take(&a, r->team_count, sizeof *f->teams);
  f->parts = kt_take(&a, r->moe->parts, sizeof *f->parts);
  f->workers = kt_take(&a, threads, sizeof *f->workers);
  kt_take_adapted(&a, r, slots, &f->adapted);
  for (int64_t t = 0; t < r->team_count; t++)
    lay_out_team(&a, f, memory ? f->teams + t : NULL, slots);
  for (int64_t t = 0; t < threads; t++) lay_out_worker(&a, f, memory ? f->workers + t : NULL);
  f->partial_size = r->tokens * r->moe->hidden;
  float *partial = kt_take(&a, r->moe->parts * f->partial_size, sizeof *partial);
  for (int64_t p = 0; memory && p < r->moe->parts; p++)
    f->parts[p].partial = partial + p * f->partial_size;
  return a.used;
}

/* ---- Steps of a team ------------------------------------------------------ */

static void make_x_rows(const forward *f, team *t, worker *w) {
  const int64_t hidden = f->run.moe->hidden;
  for (int64_t first, count; kt_share_take(&t->rows, &first, &count);)
    for (int64_t token = first; token < first + count; token++) {
      f->read(&f->x, f->run.first_token + token, 1, w->values, hidden);
      kt_rows_quantize(f->run.format->rows_kind, hidden, f->run.moe->layout.group, w->values,
                       t->x_rows + token * f->x_stride);
    }
}

static void make_mid_rows(forward *f, team *t, int64_t part) {
  const int64_t width = f->run.width;
  for (int64_t first, count; kt_share_take(&f->parts[part].middle, &first, &count);)
    for (int64_t slot = first; slot < first + count; slot++) {
      const float *const middle = t->middle + slot * width;
      uint8_t *const row = t->mid_rows + slot * f->mid_stride;
      kt_rows_quantize(f->run.format->rows_kind, width, f->run.moe->layout.group, middle, row);
      kt_adapted_middle(&f->adapted, &f->run, &t->adapted, part, slot, middle, row);
    }
}

/* Activation rows of `count` slots from `slot` on: in place where their tokens follow one
 * another, else copied side by side. */
static const uint8_t *x_rows_of(const forward *f, const team *t, worker *w, int64_t slot,
                                int64_t count) {
  const int32_t *token = f->run.route.token + slot;
  const size_t stride = (size_t)f->x_stride;
  if (kt_in_a_row(token, count)) return t->x_rows + (size_t)token[0] * stride;
  if (w->gathered == slot) return w->gather;
  for (int64_t i = 0; i < count; i++)
    memcpy(w->gather + (size_t)i * stride, t->x_rows + (size_t)token[i] * stride, stride);
  w->gathered = slot;
  return w->gather;
}

static kt_inner_item inner_item(const forward *f, int64_t part, int64_t item, int64_t *active) {
  const int64_t all = f->run.width / KT_STRIP, items = kt_ceil_div(all, f->gate_up_strips);
  const int64_t strip = item % items * f->gate_up_strips;
  *active = item / items;
  return (kt_inner_item){f->run.route.active[*active], part, strip * KT_STRIP,
                         kt_smaller(f->gate_up_strips, all - strip)};
}

/* Up alone where the function has no gate. */
static void gate_up_item(const forward *f, team *t, worker *w, int64_t part, int64_t number) {
  const kt_run *const r = &f->run;
  int64_t active;
  const kt_inner_item item = inner_item(f, part, number, &active);
  const int gated = kt_has_gate(r->moe->activation.function);
  const kt_expert *e = r->moe->expert + part * r->moe->experts + item.expert;
  const kt_weight gate = {e->gate, e->gate_scale, r->width, r->moe->hidden, r->moe->layout};
  const kt_weight up = {e->up, e->up_scale, r->width, r->moe->hidden, r->moe->layout};
  const int64_t strip = item.row / KT_STRIP;
  kt_inner inner = {.gate_bias = e->gate_bias ? e->gate_bias + item.row : NULL,
                    .up_bias = e->up_bias ? e->up_bias + item.row : NULL,
                    .strips = item.strips,
                    .stride = r->width};
  kt_adapted_inner_strips(&f->adapted, r, &w->lora, &item);
  const kt_blocks b = kt_expert_blocks(&r->route, active, KT_MAX_TOKENS);
  for (int64_t i = 0; i < b.number; i++) {
    const int64_t slot = kt_block_start(&b, i), count = kt_block_start(&b, i + 1) - slot;
    const uint8_t *x = x_rows_of(f, t, w, slot, count);
    if (gated) {
      f->product(&gate, strip, item.strips, x, f->x_stride, count, w->gate, w->panel);
      kt_adapted_add_inner(&f->adapted, &w->lora, w->panel, KT_GATE, &item, slot, count, w->gate);
      kt_adapted_save_inner(&f->adapted, r, KT_GATE, &item, w->gate, inner.gate_bias, slot, count);
    }
    f->product(&up, strip, item.strips, x, f->x_stride, count, w->up, w->panel);
    kt_adapted_add_inner(&f->adapted, &w->lora, w->panel, KT_UP, &item, slot, count, w->up);
    kt_adapted_save_inner(&f->adapted, r, KT_UP, &item, w->up, inner.up_bias, slot, count);
    inner.gate = kt_sums_of(w->gate, count), inner.up = kt_sums_of(w->up, count);
    inner.out = t->middle + slot * r->width + item.row;
    f->activate(&r->moe->activation, &inner, 0, count);
  }
}

static void add_block(const forward *f, const worker *w, const float *bias, float *partial,
                      int64_t strip, int64_t strips, int64_t slot, int64_t count) {
  const int64_t hidden = f->run.moe->hidden;
  const kt_route *const route = &f->run.route;
  const kt_weighted given = {.down = kt_sums_of(w->gate, count),
                          .bias = bias ? bias + strip * KT_STRIP : NULL,
                          .strips = strips,
                          .weight = route->weight + slot,
                          .token = route->token + slot,
                          .y = partial + strip * KT_STRIP,
                          .stride = hidden};
  f->epilogue->add_weighted(&given, 0, count);
}

static void down_item(const forward *f, const team *t, worker *w, int64_t part, int64_t item) {
  const kt_run *const r = &f->run;
  const int64_t hidden = r->moe->hidden, strip = item * f->down_strips;
  const int64_t strips = kt_smaller(f->down_strips, hidden / KT_STRIP - strip);
  float *const partial = f->parts[part].partial;
  for (int64_t token = 0; token < r->tokens; token++)
    memset(partial + token * hidden + strip * KT_STRIP, 0,
           (size_t)(strips * KT_STRIP) * sizeof *partial);
  for (int64_t a = 0; a < r->route.active_count; a++) {
    const int32_t expert = r->route.active[a];
    const kt_expert *e = r->moe->expert + part * r->moe->experts + expert;
    const kt_weight down = {e->down, e->down_scale, hidden, r->width, r->moe->layout};
    const kt_blocks b = kt_expert_blocks(&r->route, a, KT_MAX_TOKENS);
    kt_adapted_down_strips(&f->adapted, &w->lora, expert, strip * KT_STRIP, strips);
    for (int64_t i = 0; i < b.number; i++) {
      const int64_t slot = kt_block_start(&b, i), count = kt_block_start(&b, i + 1) - slot;
      f->product(&down, strip, strips, t->mid_rows + slot * f->mid_stride, f->mid_stride, count,
                 w->gate, w->panel);
      kt_adapted_add_down(&f->adapted, &t->adapted, &w->lora, w->panel, strips, slot, count,
                          w->gate);
      add_block(f, w, e->down_bias, partial, strip, strips, slot, count);
    }
  }
}

/* The team's rows of the middle; only looked at where they are bf16. */
static kt_rows_view middle_rows(const forward *f, const team *t) {
  return (kt_rows_view){.rows = t->mid_rows, .stride = f->mid_stride, .cols = f->run.width};
}

static void make_down_rows(forward *f, team *t, worker *w, int64_t part) {
  const kt_rows_view own = middle_rows(f, t);
  for (int64_t first, count; kt_share_take(&f->parts[part].products, &first, &count);)
    for (int64_t i = first; i < first + count; i++)
      kt_adapted_down_rows(&f->adapted, &f->run, &t->adapted, &w->lora, &own, w->panel, part, i);
  kt_barrier_wait(&t->barrier);
}

static void compute_part(forward *f, team *t, worker *w, int64_t part) {
  part_work *const p = f->parts + part;
  w->gathered = -1;
  for (int64_t first, count; kt_share_take(&p->gate_up, &first, &count);)
    for (int64_t i = first; i < first + count; i++) gate_up_item(f, t, w, part, i);
  kt_barrier_wait(&t->barrier);
  make_mid_rows(f, t, part);
  kt_barrier_wait(&t->barrier);
  if (kt_adapts(&f->adapted.adapter, KT_DOWN)) make_down_rows(f, t, w, part);
  for (int64_t first, count; kt_share_take(&p->down, &first, &count);)
    for (int64_t i = first; i < first + count; i++) down_item(f, t, w, part, i);
}

static void finish(forward *f, worker *w) {
  const int64_t hidden = f->run.moe->hidden;
  for (int64_t first, count; kt_share_take(&f->finish, &first, &count);)
    for (int64_t i = first; i < first + count; i++) {
      const int64_t token = f->run.first_token + i;
      f->epilogue->sum(f->parts[0].partial + i * hidden, f->run.moe->parts, f->partial_size,
                       f->add ? f->add + token * hidden : NULL, hidden, w->values);
      kt_rows_store(f->y_dtype, w->values, hidden, f->y + (size_t)token * f->y_size);
    }
}

/* ---- The job --------------------------------------------------------------- */

/* The team's rows of x; only looked at where they are bf16. */
static kt_rows_view x_rows(const forward *f, const team *t) {
  return (kt_rows_view){.rows = t->x_rows,
                        .stride = f->x_stride,
                        .cols = f->run.moe->hidden,
                        .index = f->run.route.token};
}

static void forward_job(void *context, int32_t thread) {
  forward *f = context;
  const uint64_t mode = kt_float_mode_enter();
  const int64_t index = kt_team_of(&f->run, thread);
  team *t = f->teams + index;
  worker *w = f->workers + thread;
  make_x_rows(f, t, w);
  kt_barrier_wait(&t->barrier);
  const kt_rows_view own = x_rows(f, t);
  kt_adapted_inputs(&f->run, &f->adapted, &w->lora, &f->x, &own, w->values, w->panel);
  for (int64_t part = kt_first_part(&f->run, index); part < kt_first_part(&f->run, index + 1);
       part++)
    compute_part(f, t, w, part);
  kt_barrier_wait(&f->run.all);
  finish(f, w);
  kt_float_mode_leave(mode);
}

static void prepare_team(forward *f, int64_t index) {
  const kt_run *const r = &f->run;
  const int32_t threads = kt_team_threads(r, index);
  kt_barrier_init(&f->teams[index].barrier, threads);
  kt_share_init(&f->teams[index].rows, r->tokens, 1, threads);
  for (int64_t part = kt_first_part(r, index); part < kt_first_part(r, index + 1); part++) {
    part_work *p = f->parts + part;
    const int64_t per_expert = kt_ceil_div(r->width / KT_STRIP, f->gate_up_strips);
    kt_share_init(&p->gate_up, r->route.active_count * per_expert, 1, threads);
    kt_share_init(&p->middle, r->route.slots, 1, threads);
    kt_share_init(&p->products, r->route.active_count, 1, threads);
    kt_share_init(&p->down, kt_ceil_div(r->moe->hidden / KT_STRIP, f->down_strips), 1, threads);
  }
}

static kt_status forward_batch(forward *f) {
  kt_run *const r = &f->run;
  const int32_t threads = kt_pool_threads(r->pool);
  const int64_t team_size = kt_larger(1, threads / r->team_count);
  const int64_t strips = r->route.active_count * (r->width / KT_STRIP);
  const int64_t tokens = kt_largest_block(&r->route);
  f->gate_up_strips = kt_strips_per_item(strips, team_size, tokens);
  f->down_strips = kt_strips_per_item(r->moe->hidden / KT_STRIP, team_size, tokens);
  kt_barrier_init(&r->all, threads);
  kt_share_init(&f->finish, r->tokens, 1, threads);
  kt_adapted_start(r, &f->adapted);
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

static forward start(const kt_moe *moe, const kt_lora *lora, const kt_pool *pool, int64_t tokens,
                     int64_t top_k) {
  const kt_epilogue *epilogue = KT_CELL(kt_epilogues);
  forward f = {
      .run = kt_run_of(moe, pool, tokens, top_k),
      .epilogue = epilogue,
      .activate = epilogue->activate[moe->activation.function],
  };
  if (lora) f.adapted.adapter = kt_adapter_of(moe, lora);
  f.product = kt_format_product(f.run.format);
  f.x_stride = (int64_t)kt_rows_stride(f.run.format->rows_kind, moe->hidden, moe->layout.group);
  f.mid_stride = (int64_t)kt_rows_stride(f.run.format->rows_kind, f.run.width, moe->layout.group);
  return f;
}

size_t kt_forward_scratch_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens,
                               int64_t top_k, const kt_pool *pool) {
  forward f = start(moe, lora, pool, tokens, top_k);
  return lay_out(&f, NULL);
}

size_t kt_moe_scratch_size(const kt_moe *moe, int64_t tokens, int64_t top_k, const kt_pool *pool) {
  if (!pool || kt_check_layer(moe) != KT_OK || kt_check_batch(moe, tokens, top_k) != KT_OK)
    return 0;
  return kt_forward_scratch_size(moe, NULL, tokens, top_k, pool);
}

static kt_status check_outputs(const kt_moe_call *c) {
  const size_t size = kt_value_size(c->y_dtype);
  const int good = c->y && size && kt_aligned(c->y, size) && kt_aligned(c->add, sizeof(float));
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

static void start_call(forward *f, const kt_moe_call *c, void *saved) {
  const kt_moe *const moe = f->run.moe;
  f->read = kt_decode_rows_best();
  f->x = kt_run_values(moe, c->x, c->tokens, c->x_dtype);
  f->add = c->add, f->y = c->y, f->y_dtype = c->y_dtype;
  f->y_size = (size_t)moe->hidden * kt_value_size(c->y_dtype);
  if (saved) kt_saved_at(moe, &f->adapted.adapter, c->tokens * c->top_k, saved, &f->adapted.saved);
  if (saved) kt_adapted_cuts(&f->adapted, &moe->activation);
  kt_run_skip(&f->run, c);
}

static kt_status each_batch(forward *f, const kt_moe_call *c, kt_status (*step)(forward *)) {
  kt_status status = KT_OK;
  for (int64_t first = 0; first < c->tokens && status == KT_OK; first += KT_BATCH) {
    kt_run_batch(&f->run, c, first);
    status = step(f);
  }
  return status;
}

static kt_status check_batch_experts(forward *f) { return kt_check_experts(&f->run); }

kt_status kt_forward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool, const kt_moe_call *call,
                     void *saved, void *scratch, size_t scratch_size) {
  const kt_status status = pool ? kt_check_layer(moe) : KT_ERR_ARGUMENT;
  if (status != KT_OK) return status;
  if (!call || kt_check_batch(moe, call->tokens, call->top_k) != KT_OK) return KT_ERR_ARGUMENT;
  if (call->tokens == 0) return KT_OK;
  if (kt_check_inputs(call) != KT_OK || check_outputs(call) != KT_OK || !scratch ||
      !kt_aligned(scratch, LINE) || !kt_aligned(saved, LINE))
    return KT_ERR_ARGUMENT;
  forward f = start(moe, lora, pool, call->tokens, call->top_k);
  f.adapted.saves = saved != NULL;
  if (scratch_size < kt_forward_scratch_size(moe, lora, call->tokens, call->top_k, pool))
    return KT_ERR_SCRATCH;
  lay_out(&f, scratch);
  start_call(&f, call, saved);
  /* All is checked before y is written, of which x or add may be a part. */
  const kt_status good = each_batch(&f, call, check_batch_experts);
  return good == KT_OK ? each_batch(&f, call, forward_batch) : good;
}

kt_status kt_moe_forward(const kt_moe *moe, kt_pool *pool, const kt_moe_call *call, void *scratch,
                         size_t scratch_size) {
  return kt_forward(moe, NULL, pool, call, NULL, scratch, scratch_size);
}
