/* Calls of a layer: their arguments, batches, teams and memory. */
#include "run.h"

#include "../cpu.h"
#include "../format/scales.h"

#include <string.h>

enum { LINE = 64, STRIPS_PER_THREAD = 4, PAGE = 4096, HUGE_PAGE = 2 << 20 };

/* Of all parts. Their pointers alone would fill half of what a process can address. */
static const int64_t most_experts = (int64_t)1 << 40;

/* ---- Memory ---------------------------------------------------------------- */

void *kt_take(kt_arena *arena, int64_t count, size_t size) {
  void *memory = arena->base ? arena->base + arena->used : NULL;
  arena->used += ((size_t)count * size + LINE - 1) / LINE * LINE;
  return memory;
}

void kt_take_route(kt_arena *arena, kt_route *route, int64_t experts, int64_t slots) {
  const int64_t most = kt_smaller(experts, slots);
  route->active = kt_take(arena, most, sizeof *route->active);
  route->start = kt_take(arena, most + 1, sizeof *route->start);
  route->token = kt_take(arena, slots, sizeof *route->token);
  route->pair = kt_take(arena, slots, sizeof *route->pair);
  route->weight = kt_take(arena, slots, sizeof *route->weight);
  route->fresh = kt_take(arena, slots, sizeof *route->fresh);
  route->used = kt_take(arena, slots, sizeof *route->used);
  route->count = kt_take(arena, experts, sizeof *route->count);
  route->skip = kt_take(arena, experts, sizeof *route->skip);
}

static size_t page_for(size_t size) { return size < HUGE_PAGE ? PAGE : HUGE_PAGE; }

kt_arena kt_team_arena(const kt_run *r, void *scratch, size_t scratch_size, int64_t team) {
  const size_t region = scratch_size / (size_t)r->team_count;
  const size_t whole = region / page_for(region) * page_for(region);
  return (kt_arena){scratch ? (uint8_t *)scratch + (size_t)team * whole : NULL, 0};
}

size_t kt_teams_size(const kt_run *r, size_t most) {
  const size_t page = page_for(most);
  return r->team_count == 1 ? most : (size_t)r->team_count * ((most + page - 1) / page * page);
}

/* ---- Arguments --------------------------------------------------------------- */

int kt_aligned(const void *pointer, size_t size) { return ((uintptr_t)pointer & (size - 1)) == 0; }

/* One that has tokens. */
static kt_status check_expert(const kt_moe *moe, const kt_expert *e, int64_t part) {
  const int32_t dtype = moe->layout.scale_dtype;
  const size_t size = dtype == KT_SCALE_NONE ? 1 : (size_t)kt_scale_bytes(dtype);
  const int gated = kt_has_gate(moe->activation.function), scaled = dtype != KT_SCALE_NONE;
  if (!e->up || !e->down || (gated && !e->gate)) return KT_ERR_EXPERT;
  if (scaled && (!e->up_scale || !e->down_scale || (gated && !e->gate_scale))) return KT_ERR_EXPERT;
  if (!gated && (e->gate || e->gate_scale || e->gate_bias)) return KT_ERR_ARGUMENT;
  const int good = kt_aligned(e->gate_scale, size) && kt_aligned(e->up_scale, size) &&
                   kt_aligned(e->down_scale, size) && kt_aligned(e->gate_bias, sizeof(float)) &&
                   kt_aligned(e->up_bias, sizeof(float)) &&
                   kt_aligned(e->down_bias, sizeof(float)) && (part == 0 || !e->down_bias);
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

kt_status kt_check_experts(const kt_run *r) {
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

kt_status kt_check_layer(const kt_moe *moe) {
  if (!moe || !moe->expert || moe->hidden < 1 || moe->intermediate < 1 || moe->experts < 1 ||
      moe->experts > INT32_MAX || moe->parts < 1 || moe->parts > INT32_MAX ||
      moe->experts > most_experts / moe->parts)
    return KT_ERR_ARGUMENT;
  if (check_activation(&moe->activation) != KT_OK) return KT_ERR_ARGUMENT;
  if (moe->intermediate % moe->parts) return KT_ERR_SHAPE;
  const int64_t width = moe->intermediate / moe->parts;
  const int fits = kt_product_check(&moe->layout, width, moe->hidden) == KT_OK &&
                   kt_product_check(&moe->layout, moe->hidden, width) == KT_OK;
  return fits ? KT_OK : KT_ERR_SHAPE;
}

/* The slots of a batch are counted in 32 bits, and the caller's arrays must fit the address space.
 * No size computed from what passes exceeds 63 bits: hidden and width are at most KT_MAX_COLS, so a
 * team's memory is below 2^50 bytes and a part's sums are below 2^29. A part has no more groups
 * than experts, so those of all parts, with shares of 4096 threads, are below 2^60. Regions of
 * scratch are as large as the largest: they hold less than twice the parts, and 4096 times what is
 * a team's, or all teams' own. */
kt_status kt_check_batch(const kt_moe *moe, int64_t tokens, int64_t top_k) {
  if (tokens < 0 || top_k < 1 || top_k > INT32_MAX / KT_BATCH) return KT_ERR_ARGUMENT;
  const int64_t most = INT64_MAX / (int64_t)sizeof(int64_t) / kt_larger(top_k, moe->hidden);
  return tokens <= most ? KT_OK : KT_ERR_ARGUMENT;
}

size_t kt_value_size(int dtype) {
  return dtype == KT_F32 ? 4 : dtype == KT_BF16 || dtype == KT_F16 ? 2 : 0;
}

kt_status kt_check_inputs(const kt_moe_call *c) {
  const size_t x_size = kt_value_size(c->x_dtype);
  if (!c->x || !c->ids || !c->weights || !x_size || (c->id_size != 4 && c->id_size != 8))
    return KT_ERR_ARGUMENT;
  const int good = kt_aligned(c->x, x_size) && kt_aligned(c->ids, (size_t)c->id_size) &&
                   kt_aligned(c->weights, sizeof(float));
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

/* ---- A call, batch by batch --------------------------------------------------- */

kt_run kt_run_of(const kt_moe *moe, const kt_pool *pool, int64_t tokens, int64_t top_k) {
  return (kt_run){
      .moe = moe,
      .format = kt_format_of(&moe->layout),
      .pool = (kt_pool *)(uintptr_t)pool,
      .team_count = kt_smaller(kt_pool_nodes(pool), moe->parts),
      .width = moe->intermediate / moe->parts,
      .tokens = kt_smaller(kt_larger(tokens, 1), KT_BATCH),
      .top_k = top_k,
  };
}

void kt_run_skip(kt_run *r, const kt_moe_call *c) {
  if (c->skip)
    memcpy(r->route.skip, c->skip, (size_t)r->moe->experts);
  else
    memset(r->route.skip, 0, (size_t)r->moe->experts);
}

void kt_run_batch(kt_run *r, const kt_moe_call *c, int64_t first) {
  r->first_token = first;
  r->tokens = kt_smaller(KT_BATCH, c->tokens - first);
  kt_route_group(&r->route, (const uint8_t *)c->ids + first * c->top_k * c->id_size, c->id_size,
                 c->weights + first * c->top_k, r->tokens, c->top_k, r->moe->experts);
}

kt_matrix kt_run_values(const kt_moe *moe, const void *data, int64_t tokens, int dtype) {
  return (kt_matrix){.data = data,
                     .rows = tokens,
                     .cols = moe->hidden,
                     .row_stride = moe->hidden,
                     .col_stride = 1,
                     .dtype = dtype,
                     .round_to_bf16 = dtype != KT_BF16};
}

/* ---- Teams ---------------------------------------------------------------------- */

int64_t kt_team_of(const kt_run *r, int32_t thread) {
  return kt_pool_node_of(r->pool, thread) * r->team_count / kt_pool_nodes(r->pool);
}

int64_t kt_first_part(const kt_run *r, int64_t team) {
  return kt_ceil_div(team * r->moe->parts, r->team_count);
}

int32_t kt_first_thread(const kt_run *r, int64_t team) {
  const int64_t node = kt_ceil_div(team * kt_pool_nodes(r->pool), r->team_count);
  return kt_pool_first_thread(r->pool, (int32_t)node);
}

int32_t kt_team_threads(const kt_run *r, int64_t team) {
  return kt_first_thread(r, team + 1) - kt_first_thread(r, team);
}

int32_t kt_team_rank(const kt_run *r, int32_t thread) {
  return thread - kt_first_thread(r, kt_team_of(r, thread));
}

int32_t kt_moe_part_node(int64_t parts, int64_t part, const kt_pool *pool) {
  if (!pool || part < 0 || part >= parts || parts > INT32_MAX) return -1;
  const int64_t nodes = kt_pool_nodes(pool), teams = kt_smaller(nodes, parts);
  return (int32_t)kt_ceil_div(part * teams / parts * nodes, teams);
}

/* ---- Work -------------------------------------------------------------------------- */

int64_t kt_strips_per_item(int64_t strips, int64_t threads, int64_t tokens) {
  const int64_t most = kt_smaller(KT_MAX_STRIPS, KT_MAX_PRODUCTS / tokens);
  return kt_larger(1, kt_smaller(most, strips / (threads * STRIPS_PER_THREAD)));
}

int64_t kt_largest_block(const kt_route *route) {
  int64_t most = 1;
  for (int64_t a = 0; a < route->active_count; a++) {
    const kt_blocks b = kt_expert_blocks(route, a, KT_MAX_TOKENS);
    most = kt_larger(most, kt_ceil_div(b.count, b.number));
  }
  return most;
}

/* First and last alone do not suffice: an expert may have a token twice and miss the next (0 0 2).
 */
int kt_in_a_row(const int32_t *token, int64_t count) {
  for (int64_t i = 1; i < count; i++)
    if (token[i] != token[0] + i) return 0;
  return 1;
}
