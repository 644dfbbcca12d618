/* The MoE forward: one job of the pool per batch of up to BATCH tokens.
 *
 * Threads form one team per NUMA node (fewer if there are fewer parts); a team computes
 * whole parts. In a team, between barriers:
 *   1  x as activation rows of the format           items: tokens
 *   2  gate and up products, activation -> middle   items: (expert, strips of w)
 *   3  middle as activation rows                    items: slots
 *   4  down products, weighted sum -> partial       items: strips of hidden, all experts
 * and then all teams together:
 *   5  y = add + sum of the parts                   items: tokens
 *
 * In 4 a thread owns columns of y for all experts, so sums run in a fixed order without
 * atomics or copies. Items are shared out dynamically: which thread computes one does not
 * matter for its bits. */
#include "../cpu.h"
#include "../format/scales.h"
#include "../pool/pool.h"
#include "../simd/float_mode.h"
#include "../source/decode.h"
#include "epilogue.h"
#include "route.h"
#include "rows.h"

#include <string.h>

enum { BATCH = 2048, LINE = 64, STRIPS_PER_THREAD = 4, PAGE = 4096 };

/* What one part of the layer needs while it is computed. */
typedef struct part_work {
  kt_share gate_up, middle, down;
  float *partial; /* [tokens, hidden] */
} part_work;

typedef struct team {
  kt_barrier barrier;
  kt_share rows;
  uint8_t *x_rows;   /* [tokens] activation rows of x */
  float *middle;     /* [slots, w] */
  uint8_t *mid_rows; /* [slots] activation rows of the middle */
} team;

/* Memory of one thread. `gathered` remembers which rows lie in `gather`. */
typedef struct worker {
  uint8_t *gather;  /* [KT_MAX_TOKENS] activation rows of x */
  float *gate, *up; /* [KT_MAX_PRODUCTS][KT_STRIP] */
  uint8_t *panel;   /* KT_PANEL_SIZE */
  float *values;    /* one row of x or y as binary32 */
  int64_t gathered; /* first slot, or -1 */
} worker;

typedef struct run {
  const kt_moe *moe;
  const kt_weight_format *format;
  const kt_epilogue *epilogue;
  kt_product_fn *product;
  kt_activate_fn *activate;
  kt_pool *pool;
  kt_route route;
  kt_barrier all;
  kt_share finish;
  team *teams;
  part_work *parts;
  worker *workers;
  int64_t team_count, width; /* width: columns of the middle, intermediate / parts */
  int64_t tokens, gate_up_strips, down_strips; /* the latter two: strips per item */
  int64_t x_stride, mid_stride, partial_size;
  kt_decode_rows_fn *read;
  kt_matrix x; /* of the whole call, to be rounded to bf16 */
  const float *add;
  uint8_t *y;
  int64_t first_token; /* of the batch */
  size_t y_size;       /* bytes of a row */
  int y_dtype;
} run;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- Scratch -------------------------------------------------------------
 *
 * Laid out by one function that is also run without memory, to learn the size. */

typedef struct arena {
  uint8_t *base;
  size_t used;
} arena;

static void *take(arena *a, int64_t count, size_t size) {
  void *memory = a->base ? a->base + a->used : NULL;
  a->used += ((size_t)count * size + LINE - 1) / LINE * LINE;
  return memory;
}

static void lay_out_route(arena *a, kt_route *route, int64_t experts, int64_t slots) {
  route->active = take(a, smaller(experts, slots), sizeof *route->active);
  route->start = take(a, smaller(experts, slots) + 1, sizeof *route->start);
  route->token = take(a, slots, sizeof *route->token);
  route->weight = take(a, slots, sizeof *route->weight);
  route->count = take(a, experts, sizeof *route->count);
  route->skip = take(a, experts, sizeof *route->skip);
}

static void lay_out_team(arena *a, run *r, team *t, int64_t slots) {
  uint8_t *x_rows = take(a, r->tokens, (size_t)r->x_stride);
  float *middle = take(a, slots * r->width, sizeof *middle);
  uint8_t *mid_rows = take(a, slots, (size_t)r->mid_stride);
  if (t) t->x_rows = x_rows, t->middle = middle, t->mid_rows = mid_rows;
}

static void lay_out_worker(arena *a, const run *r, worker *w) {
  const int64_t products = KT_MAX_PRODUCTS * KT_STRIP;
  const worker laid = {
      .gather = take(a, KT_MAX_TOKENS, (size_t)r->x_stride),
      .gate = take(a, products, sizeof(float)),
      .up = take(a, products, sizeof(float)),
      .panel = take(a, 1, KT_PANEL_SIZE),
      .values = take(a, r->moe->hidden, sizeof(float)),
      .gathered = -1,
  };
  if (w) *w = laid;
}

/* All pointers of `r` for batches of up to r->tokens. Returns the bytes used. */
static size_t lay_out(run *r, uint8_t *memory, int64_t top_k) {
  arena a = {memory, 0};
  const int64_t threads = kt_pool_threads(r->pool), slots = r->tokens * top_k;
  lay_out_route(&a, &r->route, r->moe->experts, slots);
  r->teams = take(&a, r->team_count, sizeof *r->teams);
  r->parts = take(&a, r->moe->parts, sizeof *r->parts);
  r->workers = take(&a, threads, sizeof *r->workers);
  for (int64_t t = 0; t < r->team_count; t++)
    lay_out_team(&a, r, memory ? r->teams + t : NULL, slots);
  for (int64_t t = 0; t < threads; t++) lay_out_worker(&a, r, memory ? r->workers + t : NULL);
  r->partial_size = r->tokens * r->moe->hidden;
  float *partial = take(&a, r->moe->parts * r->partial_size, sizeof *partial);
  for (int64_t p = 0; memory && p < r->moe->parts; p++)
    r->parts[p].partial = partial + p * r->partial_size;
  return a.used;
}

/* ---- Steps of a team ------------------------------------------------------ */

static void make_x_rows(run *r, team *t, worker *w) {
  const int64_t hidden = r->moe->hidden;
  for (int64_t first, count; kt_share_take(&t->rows, &first, &count);)
    for (int64_t token = first; token < first + count; token++) {
      r->read(&r->x, r->first_token + token, 1, w->values, hidden);
      kt_rows_quantize(r->format->rows_kind, hidden, r->moe->layout.group, w->values,
                       t->x_rows + token * r->x_stride);
    }
}

static void make_mid_rows(run *r, team *t, part_work *p) {
  for (int64_t first, count; kt_share_take(&p->middle, &first, &count);)
    for (int64_t slot = first; slot < first + count; slot++)
      kt_rows_quantize(r->format->rows_kind, r->width, r->moe->layout.group,
                       t->middle + slot * r->width, t->mid_rows + slot * r->mid_stride);
}

/* Whether each slot's token is the one after that of the slot before. First and last alone do
 * not suffice: an expert may have a token twice and miss the next (0 0 2). */
static int in_a_row(const int32_t *token, int64_t count) {
  for (int64_t i = 1; i < count; i++)
    if (token[i] != token[0] + i) return 0;
  return 1;
}

/* Activation rows of `count` slots from `slot` on: in place where their tokens follow one
 * another, else copied side by side. */
static const uint8_t *x_rows_of(const run *r, const team *t, worker *w, int64_t slot,
                                int64_t count) {
  const int32_t *token = r->route.token + slot;
  const size_t stride = (size_t)r->x_stride;
  if (in_a_row(token, count)) return t->x_rows + (size_t)token[0] * stride;
  if (w->gathered == slot) return w->gather;
  for (int64_t i = 0; i < count; i++)
    memcpy(w->gather + (size_t)i * stride, t->x_rows + (size_t)token[i] * stride, stride);
  w->gathered = slot;
  return w->gather;
}

/* Slots of an expert in blocks of nearly equal size, at most KT_MAX_TOKENS each. */
typedef struct blocks {
  int64_t first, count, number;
} blocks;

static blocks blocks_of(const kt_route *route, int64_t a) {
  const int64_t first = route->start[a], count = route->start[a + 1] - first;
  return (blocks){first, count, ceil_div(count, KT_MAX_TOKENS)};
}

static int64_t block_start(const blocks *b, int64_t i) {
  return b->first + b->count * i / b->number;
}

/* Up alone where the function has no gate. */
static void gate_up_item(const run *r, team *t, worker *w, const kt_expert *experts, int64_t item) {
  const int gated = kt_has_gate(r->moe->activation.function);
  const int64_t all = r->width / KT_STRIP, items = ceil_div(all, r->gate_up_strips);
  const int64_t a = item / items, strip = item % items * r->gate_up_strips;
  const int64_t strips = smaller(r->gate_up_strips, all - strip);
  const kt_expert *e = experts + r->route.active[a];
  const kt_weight gate = {e->gate, e->gate_scale, r->width, r->moe->hidden, r->moe->layout};
  const kt_weight up = {e->up, e->up_scale, r->width, r->moe->hidden, r->moe->layout};
  const int64_t row = strip * KT_STRIP;
  kt_inner inner = {.gate = w->gate,
                    .up = w->up,
                    .gate_bias = e->gate_bias ? e->gate_bias + row : NULL,
                    .up_bias = e->up_bias ? e->up_bias + row : NULL,
                    .strips = strips,
                    .stride = r->width};
  const blocks b = blocks_of(&r->route, a);
  for (int64_t i = 0; i < b.number; i++) {
    const int64_t slot = block_start(&b, i), count = block_start(&b, i + 1) - slot;
    const uint8_t *x = x_rows_of(r, t, w, slot, count);
    if (gated) r->product(&gate, strip, strips, x, r->x_stride, count, w->gate, w->panel);
    r->product(&up, strip, strips, x, r->x_stride, count, w->up, w->panel);
    inner.tokens = count, inner.out = t->middle + slot * r->width + row;
    r->activate(&r->moe->activation, &inner);
  }
}

static void add_block(const run *r, const worker *w, const float *bias, float *partial,
                      int64_t strip, int64_t strips, int64_t slot, int64_t count) {
  const int64_t hidden = r->moe->hidden;
  for (int64_t s = 0; s < strips; s++)
    for (int64_t i = 0; i < count; i++) {
      const int64_t column = (strip + s) * KT_STRIP, token = r->route.token[slot + i];
      r->epilogue->accumulate(r->route.weight[slot + i], w->gate + (s * count + i) * KT_STRIP,
                              bias ? bias + column : NULL, partial + token * hidden + column);
    }
}

static void down_item(const run *r, const team *t, worker *w, const kt_expert *experts,
                      float *partial, int64_t item) {
  const int64_t hidden = r->moe->hidden, strip = item * r->down_strips;
  const int64_t strips = smaller(r->down_strips, hidden / KT_STRIP - strip);
  for (int64_t token = 0; token < r->tokens; token++)
    memset(partial + token * hidden + strip * KT_STRIP, 0,
           (size_t)(strips * KT_STRIP) * sizeof *partial);
  for (int64_t a = 0; a < r->route.active_count; a++) {
    const kt_expert *e = experts + r->route.active[a];
    const kt_weight down = {e->down, e->down_scale, hidden, r->width, r->moe->layout};
    const blocks b = blocks_of(&r->route, a);
    for (int64_t i = 0; i < b.number; i++) {
      const int64_t slot = block_start(&b, i), count = block_start(&b, i + 1) - slot;
      r->product(&down, strip, strips, t->mid_rows + slot * r->mid_stride, r->mid_stride, count,
                 w->gate, w->panel);
      add_block(r, w, e->down_bias, partial, strip, strips, slot, count);
    }
  }
}

static void compute_part(run *r, team *t, worker *w, int64_t part) {
  part_work *p = r->parts + part;
  const kt_expert *experts = r->moe->expert + part * r->moe->experts;
  w->gathered = -1;
  for (int64_t first, count; kt_share_take(&p->gate_up, &first, &count);)
    for (int64_t i = first; i < first + count; i++) gate_up_item(r, t, w, experts, i);
  kt_barrier_wait(&t->barrier);
  make_mid_rows(r, t, p);
  kt_barrier_wait(&t->barrier);
  for (int64_t first, count; kt_share_take(&p->down, &first, &count);)
    for (int64_t i = first; i < first + count; i++) down_item(r, t, w, experts, p->partial, i);
}

static void finish(run *r, worker *w) {
  const int64_t hidden = r->moe->hidden;
  for (int64_t first, count; kt_share_take(&r->finish, &first, &count);)
    for (int64_t i = first; i < first + count; i++) {
      const int64_t token = r->first_token + i;
      r->epilogue->sum(r->parts[0].partial + i * hidden, r->moe->parts, r->partial_size,
                       r->add ? r->add + token * hidden : NULL, hidden, w->values);
      kt_rows_store(r->y_dtype, w->values, hidden, r->y + (size_t)token * r->y_size);
    }
}

/* ---- The job ---------------------------------------------------------------
 *
 * Team t has the nodes n with n * teams / nodes == t, and the parts likewise. */

static int64_t team_of(const run *r, int32_t thread) {
  return kt_pool_node_of(r->pool, thread) * r->team_count / kt_pool_nodes(r->pool);
}

static int64_t first_part(const run *r, int64_t team_index) {
  return ceil_div(team_index * r->moe->parts, r->team_count);
}

static void forward_job(void *context, int32_t thread) {
  run *r = context;
  const uint64_t mode = kt_float_mode_enter();
  const int64_t index = team_of(r, thread);
  team *t = r->teams + index;
  worker *w = r->workers + thread;
  make_x_rows(r, t, w);
  kt_barrier_wait(&t->barrier);
  for (int64_t part = first_part(r, index); part < first_part(r, index + 1); part++)
    compute_part(r, t, w, part);
  kt_barrier_wait(&r->all);
  finish(r, w);
  kt_float_mode_leave(mode);
}

static int32_t team_threads(const run *r, int64_t index) {
  int32_t count = 0;
  for (int32_t thread = 0; thread < kt_pool_threads(r->pool); thread++)
    count += team_of(r, thread) == index;
  return count;
}

/* Few items per thread leave some idle at the end, many make each too short to stream: every
 * jump to another matrix costs 0.3 us of reading from memory (Zen 4). `tokens`: of the largest
 * product call. */
static int64_t strips_per_item(int64_t strips, int64_t threads, int64_t tokens) {
  const int64_t most = smaller(KT_MAX_STRIPS, KT_MAX_PRODUCTS / tokens);
  return larger(1, smaller(most, strips / (threads * STRIPS_PER_THREAD)));
}

/* Tokens of the largest block of any expert, at least 1. */
static int64_t largest_block(const kt_route *route) {
  int64_t most = 1;
  for (int64_t a = 0; a < route->active_count; a++) {
    const blocks b = blocks_of(route, a);
    most = larger(most, ceil_div(b.count, b.number));
  }
  return most;
}

static void prepare_team(run *r, int64_t index) {
  const int32_t threads = team_threads(r, index);
  kt_barrier_init(&r->teams[index].barrier, threads);
  kt_share_init(&r->teams[index].rows, r->tokens, 1, threads);
  for (int64_t part = first_part(r, index); part < first_part(r, index + 1); part++) {
    part_work *p = r->parts + part;
    const int64_t per_expert = ceil_div(r->width / KT_STRIP, r->gate_up_strips);
    kt_share_init(&p->gate_up, r->route.active_count * per_expert, 1, threads);
    kt_share_init(&p->middle, r->route.slots, 1, threads);
    kt_share_init(&p->down, ceil_div(r->moe->hidden / KT_STRIP, r->down_strips), 1, threads);
  }
}

static kt_status forward_batch(run *r) {
  const int32_t threads = kt_pool_threads(r->pool);
  const int64_t team_size = larger(1, threads / r->team_count);
  const int64_t strips = r->route.active_count * (r->width / KT_STRIP);
  const int64_t tokens = largest_block(&r->route);
  r->gate_up_strips = strips_per_item(strips, team_size, tokens);
  r->down_strips = strips_per_item(r->moe->hidden / KT_STRIP, team_size, tokens);
  kt_barrier_init(&r->all, threads);
  kt_share_init(&r->finish, r->tokens, 1, threads);
  for (int64_t index = 0; index < r->team_count; index++) prepare_team(r, index);
  return kt_pool_run(r->pool, forward_job, r);
}

/* ---- Public entry points --------------------------------------------------- */

/* size: a power of two. */
static int aligned(const void *pointer, size_t size) {
  return ((uintptr_t)pointer & (size - 1)) == 0;
}

/* One that has tokens. */
static kt_status check_expert(const kt_moe *moe, const kt_expert *e, int64_t part) {
  const int32_t dtype = moe->layout.scale_dtype;
  const size_t size = dtype == KT_SCALE_NONE ? 1 : (size_t)kt_scale_bytes(dtype);
  const int gated = kt_has_gate(moe->activation.function), scaled = dtype != KT_SCALE_NONE;
  if (!e->up || !e->down || (gated && !e->gate)) return KT_ERR_EXPERT;
  if (scaled && (!e->up_scale || !e->down_scale || (gated && !e->gate_scale))) return KT_ERR_EXPERT;
  if (!gated && (e->gate || e->gate_scale || e->gate_bias)) return KT_ERR_ARGUMENT;
  const int good = aligned(e->gate_scale, size) && aligned(e->up_scale, size) &&
                   aligned(e->down_scale, size) && aligned(e->gate_bias, sizeof(float)) &&
                   aligned(e->up_bias, sizeof(float)) && aligned(e->down_bias, sizeof(float)) &&
                   (part == 0 || !e->down_bias);
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

static kt_status check_experts(run *r) {
  for (int64_t part = 0; part < r->moe->parts; part++)
    for (int64_t a = 0; a < r->route.active_count; a++) {
      const kt_expert *e = r->moe->expert + part * r->moe->experts + r->route.active[a];
      const kt_status status = check_expert(r->moe, e, part);
      if (status != KT_OK) return status;
    }
  return KT_OK;
}

static int is_function(int function) { return function >= 0 && function < KT_GATE_FUNCTIONS; }

int kt_function_has_gate(int function) {
  return is_function(function) ? kt_has_gate(function) : -1;
}

/* A NaN is neither >= 0 nor > 0. */
static kt_status check_activation(const kt_activation *a) {
  const int capped = a->function != KT_SOFTCAP || (a->alpha > 0 && a->beta > 0);
  return is_function(a->function) && capped && a->limit >= 0 ? KT_OK : KT_ERR_ARGUMENT;
}

static kt_status check_layer(const kt_moe *moe, const kt_pool *pool) {
  if (!moe || !pool || !moe->expert || moe->hidden < 1 || moe->intermediate < 1 ||
      moe->experts < 1 || moe->experts > INT32_MAX || moe->parts < 1 || moe->parts > INT32_MAX)
    return KT_ERR_ARGUMENT;
  if (check_activation(&moe->activation) != KT_OK) return KT_ERR_ARGUMENT;
  if (moe->intermediate % moe->parts) return KT_ERR_SHAPE;
  const int64_t width = moe->intermediate / moe->parts;
  const int fits = kt_product_check(&moe->layout, width, moe->hidden) == KT_OK &&
                   kt_product_check(&moe->layout, moe->hidden, width) == KT_OK;
  return fits ? KT_OK : KT_ERR_SHAPE;
}

/* Numbers of a call. The slots of a batch are counted in 32 bits, and the caller's arrays must
 * fit the address space. No size computed from what passes exceeds 63 bits: hidden and width are
 * at most KT_MAX_COLS, so a team's memory is below 2^50 bytes and a part's below 2^29. */
static kt_status check_batch(const kt_moe *moe, int64_t tokens, int64_t top_k) {
  if (tokens < 0 || top_k < 1 || top_k > INT32_MAX / BATCH) return KT_ERR_ARGUMENT;
  const int64_t most = INT64_MAX / (int64_t)sizeof(int64_t) / larger(top_k, moe->hidden);
  return tokens <= most ? KT_OK : KT_ERR_ARGUMENT;
}

/* Bytes of an element; 0: not a dtype of x and y. */
static size_t element_size(int dtype) {
  return dtype == KT_F32 ? 4 : dtype == KT_BF16 || dtype == KT_F16 ? 2 : 0;
}

static kt_status check_arrays(const kt_moe_call *c, const void *scratch) {
  const size_t x_size = element_size(c->x_dtype), y_size = element_size(c->y_dtype);
  if (!c->x || !c->ids || !c->weights || !c->y || !scratch || !x_size || !y_size ||
      (c->id_size != 4 && c->id_size != 8))
    return KT_ERR_ARGUMENT;
  const int good = aligned(c->x, x_size) && aligned(c->y, y_size) &&
                   aligned(c->ids, (size_t)c->id_size) && aligned(c->weights, sizeof(float)) &&
                   aligned(c->add, sizeof(float)) && aligned(scratch, LINE);
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

int kt_moe_has_kernels(const kt_layout *layout, int isa) {
  const kt_weight_format *format = kt_format_of(layout);
  if (!format || !format->product[KT_ISA_SCALAR]) return 0;
  return kt_isa_has_cell(isa, format->product, sizeof *format->product) ||
         kt_isa_has_cell(isa, kt_epilogues, sizeof *kt_epilogues);
}

static run start_run(const kt_moe *moe, kt_pool *pool, int64_t tokens) {
  const kt_weight_format *format = kt_format_of(&moe->layout);
  const kt_epilogue *epilogue = KT_CELL(kt_epilogues);
  const int64_t width = moe->intermediate / moe->parts;
  run r = {
      .moe = moe,
      .format = format,
      .epilogue = epilogue,
      .product = kt_format_product(format),
      .activate = epilogue->activate[moe->activation.function],
      .pool = pool,
      .team_count = smaller(kt_pool_nodes(pool), moe->parts),
      .width = width,
      .tokens = smaller(tokens, BATCH),
      .x_stride = (int64_t)kt_rows_stride(format->rows_kind, moe->hidden, moe->layout.group),
      .mid_stride = (int64_t)kt_rows_stride(format->rows_kind, width, moe->layout.group),
  };
  return r;
}

int32_t kt_moe_part_node(int64_t parts, int64_t part, const kt_pool *pool) {
  if (!pool || part < 0 || part >= parts || parts > INT32_MAX) return -1;
  const int64_t nodes = kt_pool_nodes(pool), teams = smaller(nodes, parts);
  return (int32_t)ceil_div(part * teams / parts * nodes, teams);
}

size_t kt_moe_scratch_size(const kt_moe *moe, int64_t tokens, int64_t top_k, const kt_pool *pool) {
  if (check_layer(moe, pool) != KT_OK || check_batch(moe, tokens, top_k) != KT_OK) return 0;
  run r = start_run(moe, (kt_pool *)(uintptr_t)pool, larger(tokens, 1));
  return lay_out(&r, NULL, top_k);
}

/* Experts to skip are copied: the caller may change them meanwhile. */
static void start_call(run *r, const kt_moe_call *c) {
  const int64_t experts = r->moe->experts;
  r->read = kt_decode_rows_best();
  r->x = (kt_matrix){.data = c->x,
                     .rows = c->tokens,
                     .cols = r->moe->hidden,
                     .row_stride = r->moe->hidden,
                     .col_stride = 1,
                     .dtype = c->x_dtype,
                     .round_to_bf16 = c->x_dtype != KT_BF16};
  r->add = c->add, r->y = c->y, r->y_dtype = c->y_dtype;
  r->y_size = (size_t)r->moe->hidden * element_size(c->y_dtype);
  if (c->skip)
    memcpy(r->route.skip, c->skip, (size_t)experts);
  else
    memset(r->route.skip, 0, (size_t)experts);
}

static void start_batch(run *r, const kt_moe_call *c, int64_t first) {
  r->first_token = first;
  r->tokens = smaller(BATCH, c->tokens - first);
  kt_route_group(&r->route, (const uint8_t *)c->ids + first * c->top_k * c->id_size, c->id_size,
                 c->weights + first * c->top_k, r->tokens, c->top_k, r->moe->experts);
}

static kt_status each_batch(run *r, const kt_moe_call *c, kt_status (*step)(run *)) {
  kt_status status = KT_OK;
  for (int64_t first = 0; first < c->tokens && status == KT_OK; first += BATCH) {
    start_batch(r, c, first);
    status = step(r);
  }
  return status;
}

kt_status kt_moe_forward(const kt_moe *moe, kt_pool *pool, const kt_moe_call *call, void *scratch,
                         size_t scratch_size) {
  const kt_status status = check_layer(moe, pool);
  if (status != KT_OK) return status;
  if (!call || check_batch(moe, call->tokens, call->top_k) != KT_OK) return KT_ERR_ARGUMENT;
  if (call->tokens == 0) return KT_OK;
  if (check_arrays(call, scratch) != KT_OK) return KT_ERR_ARGUMENT;
  if (scratch_size < kt_moe_scratch_size(moe, call->tokens, call->top_k, pool))
    return KT_ERR_SCRATCH;
  run r = start_run(moe, pool, call->tokens);
  lay_out(&r, scratch, call->top_k);
  start_call(&r, call);
  /* All is checked before y is written, of which x or add may be a part. */
  const kt_status good = each_batch(&r, call, check_experts);
  return good == KT_OK ? each_batch(&r, call, forward_batch) : good;
}

/* ---- Touching pages --------------------------------------------------------
 *
 * Of each part, every thread of its team has neighbouring experts. */

static void touch_pages(const void *memory, size_t size) {
  const volatile uint8_t *bytes = memory;
  for (size_t i = 0; i < size; i += PAGE) (void)bytes[i];
}

/* Position of a thread in its team. */
static int32_t team_rank(const run *r, int32_t thread) {
  int32_t rank = 0;
  for (int32_t t = 0; t < thread; t++) rank += team_of(r, t) == team_of(r, thread);
  return rank;
}

static void touch_job(void *context, int32_t thread) {
  const run *r = context;
  const kt_layout *layout = &r->moe->layout;
  const size_t wide = kt_packed_size(layout, r->width, r->moe->hidden);
  const size_t tall = kt_packed_size(layout, r->moe->hidden, r->width);
  const int gated = kt_has_gate(r->moe->activation.function);
  const int64_t index = team_of(r, thread), count = r->moe->experts;
  const int64_t rank = team_rank(r, thread), threads = team_threads(r, index);
  for (int64_t part = first_part(r, index); part < first_part(r, index + 1); part++)
    for (int64_t e = count * rank / threads; e < count * (rank + 1) / threads; e++) {
      const kt_expert *x = r->moe->expert + part * count + e;
      if (x->gate && gated) touch_pages(x->gate, wide);
      if (x->up) touch_pages(x->up, wide);
      if (x->down) touch_pages(x->down, tall);
    }
}

kt_status kt_moe_touch(const kt_moe *moe, kt_pool *pool) {
  const kt_status status = check_layer(moe, pool);
  if (status != KT_OK) return status;
  run r = start_run(moe, pool, 1);
  return kt_pool_run(pool, touch_job, &r);
}
