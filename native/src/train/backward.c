/* The backward of a layer: its memory, its job, and the entry points of fine-tuning. */
#include "backward.h"

#include "../cpu.h"
#include "../moe/forward.h"
#include "../moe/rows.h"
#include "../simd/float_mode.h"

#include <string.h>

enum {
  LINE = 64,
  GROUP_SLOTS = 96, /* of a group, per thread: no more blocks are added */
};

_Static_assert((int)KT_CHUNK <= KT_TRANSPOSED_TOKENS && (int)KT_CHUNK <= KT_OUTER_SLOTS,
               "a block is multiplied at once");

/* ---- Scratch ------------------------------------------------------------------ */

/* Whether scales are to be folded, by rows or by groups: of the layout, so that memory is the same
 * on all levels. */
static int has_scales(const kt_back *b, int groups) {
  const kt_layout *const layout = &b->run.moe->layout;
  return kt_scales_to_fold(layout) && !layout->group == !groups;
}

/* A team's rows with scales folded in are others only where gate or up has scales per row. */
static void lay_out_team(kt_arena *a, const kt_back *b, kt_back_team *t) {
  const int64_t slots = b->group_slots, row = 2 * b->run.width;
  const int64_t gate = kt_has_gate(b->run.moe->activation.function) ? row : 0;
  const int64_t pairs = kt_adapts_x(&b->adapter) ? slots * b->adapter.pair_cols : 0;
  uint8_t *const dy = kt_take(a, slots, (size_t)kt_folded_stride(b->run.moe->hidden));
  uint8_t *const rows = kt_take(a, slots, (size_t)b->w_stride);
  uint8_t *folded = kt_take(a, has_scales(b, 0) ? slots : 0, (size_t)b->w_stride);
  uint16_t *const pair_rows = kt_take(a, pairs, sizeof(uint16_t));
  if (!t) return;
  if (b->folding != KT_FOLD_ROWS) t->split = folded, folded = rows;
  t->dy = dy, t->d_gate = rows, t->d_up = rows + gate;
  t->folded_gate = folded, t->folded_up = folded + gate;
  t->middle = kt_back_needs_middle(b) ? rows + gate + row : NULL;
  t->pairs = pair_rows;
}

/* Rows of weights that a product with columns of them adds up. */
static int64_t longest_sum(const kt_back *b) {
  const int gated = kt_has_gate(b->run.moe->activation.function);
  return kt_larger(b->run.moe->hidden, (1 + gated) * b->run.width);
}

static void lay_out_worker(kt_arena *a, const kt_back *b, kt_back_worker *w) {
  const int64_t hidden = b->run.moe->hidden, width = b->run.width;
  const int64_t longest = kt_larger(hidden, width);
  const int64_t pair = kt_larger(b->adapter.pair_cols, KT_STRIP);
  const int groups = has_scales(b, 1);
  const int64_t squares = 2 * kt_larger(hidden, 2 * width) / KT_STRIP;
  const size_t strip = KT_STRIP * 2, block = KT_MAX_TOKENS * KT_STRIP * sizeof(float);
  const kt_back_worker laid = {
      .lora = {.gather = kt_take(a, 1, kt_gather_size(longest)),
               .strips = kt_take(a, longest, strip),
               .spare = kt_take(a, kt_larger(longest, pair), strip),
               .out = kt_take(a, 1, block)},
      .small = kt_take(a, pair, strip),
      .folded_gate = kt_take(a, groups ? KT_CHUNK : 0, (size_t)kt_folded_stride(width)),
      .folded_up = kt_take(a, groups ? KT_CHUNK : 0, (size_t)kt_folded_stride(longest)),
      .base = kt_take(a, longest_sum(b) > KT_TRANSPOSED_SUM ? KT_BACK_SUMS : 1,
                      KT_BACK_STRIP * sizeof(float)),
      .added = kt_take(a, 1, block),
      .fold = kt_take(a, kt_larger(longest, 2 * width), sizeof(float)),
      .fold_gate = kt_take(a, longest, sizeof(float)),
      .fold_up = kt_take(a, longest, sizeof(float)),
      .a = kt_take(a, KT_CHUNK * KT_OUTER_ROWS, sizeof(float)),
      .values = kt_take(a, hidden, sizeof(float)),
      .ones = kt_take(a, KT_CHUNK, sizeof(float)),
      .outer = kt_take(a, 1, KT_OUTER_SCRATCH),
      .exact = kt_take(a, b->want.lora_bf16 ? KT_OUTER_ROWS * KT_OUTER_COLS : 0, sizeof(float)),
      .panel = kt_take(a, 1, KT_PANEL_SIZE),
      .ring = kt_take(a, 2, KT_TRANSPOSED_CHUNK),
      .sums = kt_take(a, KT_TRANSPOSED_ROWS * 2 * KT_STRIP, sizeof(int32_t)),
      .squares = kt_take(a, squares, sizeof(kt_packed_square)),
  };
  if (w) *w = laid;
}

static void lay_out_shared(kt_arena *a, kt_back *b) {
  const kt_run *const r = &b->run;
  const int64_t rank = b->adapter.rank, strips = r->moe->parts * (r->width / KT_STRIP);
  const int64_t down = kt_adapts(&b->adapter, KT_DOWN) ? b->slots : 0;
  const int64_t pair = kt_adapts_x(&b->adapter) ? b->slots : 0;
  b->dy_rows = kt_take(a, r->tokens, (size_t)b->h_stride);
  b->x_rows = kt_take(a, kt_back_needs_x(b) ? r->tokens : 0, (size_t)b->h_stride);
  b->v_down = kt_take(a, down * rank, sizeof(float));
  b->down_rows = kt_take(a, down * b->adapter.cols, sizeof(uint16_t));
  b->v_pair = kt_take(a, r->moe->parts * pair * 2 * rank, sizeof(float));
  b->dot = kt_take(a, strips * b->slots, sizeof(float));
  b->exact = kt_take(a, kt_back_exact_size(b), sizeof(float));
}

/* As many blocks as there can be: one of an expert is not filled. */
static void lay_out_groups(kt_arena *a, kt_back *b, int there) {
  const int64_t parts = b->run.moe->parts, experts = kt_smaller(b->run.moe->experts, b->slots);
  const int64_t most = experts + b->slots / KT_CHUNK;
  b->blocks = kt_take(a, most, sizeof *b->blocks);
  b->first_block = kt_take(a, experts + 1, sizeof *b->first_block);
  kt_back_group *const groups = kt_take(a, parts * most, sizeof *groups);
  for (int64_t p = 0; there && p < parts; p++) b->parts[p].groups = groups + p * most;
}

/* Threads of the largest team: groups are those of all. */
static int64_t team_size(const kt_run *r) {
  int64_t most = 1;
  for (int64_t index = 0; index < r->team_count; index++)
    most = kt_larger(most, kt_team_threads(r, index));
  return most;
}

/* All pointers for batches of up to b->run.tokens. Returns the bytes used. */
static size_t lay_out(kt_back *b, uint8_t *memory) {
  kt_arena a = {memory, 0};
  kt_run *const r = &b->run;
  const int64_t threads = kt_pool_threads(r->pool);
  b->slots = r->tokens * r->top_k;
  b->group_slots = kt_smaller(b->slots, (GROUP_SLOTS + KT_CHUNK) * team_size(r));
  kt_take_route(&a, &r->route, r->moe->experts, b->slots);
  b->teams = kt_take(&a, r->team_count, sizeof *b->teams);
  b->parts = kt_take(&a, r->moe->parts, sizeof *b->parts);
  b->workers = kt_take(&a, threads, sizeof *b->workers);
  lay_out_groups(&a, b, memory != NULL);
  lay_out_shared(&a, b);
  for (int64_t t = 0; t < r->team_count; t++) lay_out_team(&a, b, memory ? b->teams + t : NULL);
  for (int64_t t = 0; t < threads; t++) lay_out_worker(&a, b, memory ? b->workers + t : NULL);
  b->partial_size = b->want.dx ? r->tokens * r->moe->hidden : 0;
  float *partial = kt_take(&a, r->moe->parts * b->partial_size, sizeof *partial);
  b->partials = kt_take(&a, r->moe->parts, sizeof *b->partials);
  for (int64_t p = 0; memory && p < r->moe->parts; p++)
    b->partials[p] = b->parts[p].partial = partial + p * b->partial_size;
  return a.used;
}

/* ---- The job ---------------------------------------------------------------------- */

#define EACH_ITEM(share, i)                                                                        \
  for (int64_t first_, count_; kt_share_take(share, &first_, &count_);)                            \
    for (int64_t i = first_; i < first_ + count_; i++)

#define EACH_RUN(share, first, count)                                                              \
  for (int64_t first, count; kt_share_take(share, &first, &count);)

static void make_rows(const kt_back *b, const kt_back_worker *w, int64_t token) {
  const kt_run *const r = &b->run;
  const int64_t hidden = r->moe->hidden, at = r->first_token + token;
  kt_decode_rows_fn *const read = kt_decode_rows_best();
  read(&b->dy, at, 1, w->values, hidden);
  kt_rows_quantize(KT_ROWS_BF16, hidden, 0, w->values, b->dy_rows + token * b->h_stride);
  if (!kt_back_needs_x(b)) return;
  read(&b->x, at, 1, w->values, hidden);
  kt_rows_quantize(KT_ROWS_BF16, hidden, 0, w->values, b->x_rows + token * b->h_stride);
}

/* Rows of dy are other memory than those that the step before it reads. */
static void make_dy_rows(kt_back *b, kt_back_team *t, const kt_back_worker *w, kt_back_group *g,
                         int64_t part) {
  EACH_RUN(&g->rows, first, count) kt_back_rows(b, t, w, g, part, first, count);
}

/* Steps 3 to 5 of the group's block number i. */
static void whole_block(kt_back *b, kt_back_team *t, const kt_back_worker *w, kt_back_group *g,
                        int64_t part, int64_t i) {
  const kt_back_block *const block = b->blocks + g->first + i;
  const int64_t strips = b->run.width / KT_STRIP, at = block->slot - g->slot;
  const kt_back_group alone = {.first = g->first + i, .end = g->first + i + 1, .slot = g->slot};
  kt_back_rows(b, t, w, g, part, at, block->count);
  kt_back_middle(b, t, w, g, part, i * strips, strips);
  if (g->pairs.end) kt_back_pairs(b, t, w, g, part, i);
  for (int64_t k = 0; !g->outer.end && k < kt_back_outer_items(b, &alone); k++)
    kt_back_outer(b, t, w, &alone, part, k);
  if (g->split.end) kt_back_split(b, t, w, g, part, at, block->count);
}

static void wait_for_team(const kt_back *b, kt_back_team *t, const kt_back_worker *w) {
  kt_barrier_wait(&t->barrier, kt_team_rank(&b->run, (int32_t)(w - b->workers)));
}

static void step_by_step(kt_back *b, kt_back_team *t, const kt_back_worker *w, kt_back_group *g,
                         int64_t part) {
  EACH_RUN(&g->middle, first, count) kt_back_middle(b, t, w, g, part, first, count);
  wait_for_team(b, t, w);
  EACH_ITEM(&g->pairs, i) kt_back_pairs(b, t, w, g, part, i);
  EACH_ITEM(&g->outer, i) kt_back_outer(b, t, w, g, part, i);
  EACH_RUN(&g->split, first, count) kt_back_split(b, t, w, g, part, first, count);
}

static void compute_part(kt_back *b, kt_back_team *t, const kt_back_worker *w, int64_t part) {
  kt_back_group *const groups = b->parts[part].groups, *const end = groups + b->groups;
  make_dy_rows(b, t, w, groups, part);
  wait_for_team(b, t, w);
  for (kt_back_group *g = groups; g < end; g++) {
    if (g->whole)
      EACH_ITEM(&g->blocks, i) whole_block(b, t, w, g, part, i);
    else
      step_by_step(b, t, w, g, part);
    wait_for_team(b, t, w);
    EACH_RUN(&g->dx, first, count) kt_back_inputs(b, t, w, g, part, first, count);
    EACH_ITEM(&g->outer, i) kt_back_outer(b, t, w, g, part, i);
    if (g + 1 < end) make_dy_rows(b, t, w, g + 1, part);
    wait_for_team(b, t, w);
  }
}

static void finish_token(const kt_back *b, const kt_back_worker *w, int64_t i) {
  const int64_t hidden = b->run.moe->hidden, token = b->run.first_token + i;
  const size_t size = (size_t)hidden * kt_value_size(b->want.dx_dtype);
  for (int64_t p = 0; !b->run.route.used[i] && p < b->run.moe->parts; p++)
    memset(b->parts[p].partial + i * hidden, 0, (size_t)hidden * sizeof(float));
  b->epilogue->sum(b->partials, b->run.moe->parts, i * hidden, NULL, hidden, w->values);
  kt_rows_store(b->want.dx_dtype, w->values, hidden, (uint8_t *)b->want.dx + (size_t)token * size);
}

/* The number of items of a share, 0 included, is the same for all threads. */
static void finish(kt_back *b, const kt_back_worker *w, int32_t thread) {
  const kt_route *const route = &b->run.route;
  EACH_ITEM(&b->finish, i) finish_token(b, w, i);
  EACH_ITEM(&b->slot_weights, a)
  for (int64_t slot = route->start[a]; slot < route->start[a + 1]; slot++)
    kt_back_slot_weight(b, slot, route->active[a]);
  EACH_ITEM(&b->last, i) kt_back_outer(b, b->teams, w, NULL, 0, i);
  if (!b->round.end) return;
  kt_barrier_wait(&b->run.all, thread);
  EACH_ITEM(&b->round, e) kt_back_round(b, e);
}

static void backward_job(void *context, int32_t thread) {
  kt_back *b = context;
  const uint64_t mode = kt_float_mode_enter();
  const int64_t index = kt_team_of(&b->run, thread);
  const kt_back_worker *w = b->workers + thread;
  for (int i = 0; i < KT_CHUNK; i++) w->ones[i] = 1.0f;
  EACH_ITEM(&b->zeros, e) kt_back_zero(b, e);
  EACH_ITEM(&b->rows, i) make_rows(b, w, i);
  kt_barrier_wait(&b->run.all, thread);
  EACH_ITEM(&b->down, i) kt_back_down_products(b, w, i);
  kt_barrier_wait(&b->run.all, thread);
  for (int64_t part = kt_first_part(&b->run, index);
       b->groups && part < kt_first_part(&b->run, index + 1); part++)
    compute_part(b, b->teams + index, w, part);
  kt_barrier_wait(&b->run.all, thread);
  finish(b, w, thread);
  kt_float_mode_leave(mode);
}

/* Blocks do not depend on threads, so that sums over them do not. */
static void make_blocks(kt_back *b) {
  const kt_route *const route = &b->run.route;
  kt_back_block *next = b->blocks;
  for (int64_t a = 0; a < route->active_count; a++) {
    const kt_blocks all = kt_expert_blocks(route, a, KT_CHUNK);
    b->first_block[a] = (int32_t)(next - b->blocks);
    for (int64_t i = 0; i < all.number; i++) {
      const int64_t slot = kt_block_start(&all, i);
      *next++ = (kt_back_block){a, slot, kt_block_start(&all, i + 1) - slot};
    }
  }
  b->first_block[route->active_count] = (int32_t)(next - b->blocks);
}

/* Whether each thread has as much to do as the others if each does whole blocks. */
static int is_even(const kt_back *b, int64_t first, int64_t end, int64_t slots, int64_t threads) {
  int64_t most = 0;
  for (int64_t i = first; i < end; i++) most = kt_larger(most, b->blocks[i].count);
  return threads == 1 || ((end - first) % threads == 0 && 7 * most * (end - first) <= 8 * slots);
}

/* As many blocks for each thread, if there are as many. */
static kt_back_group group_from(const kt_back *b, int64_t first, int64_t *slots) {
  const int64_t threads = team_size(&b->run), all = b->first_block[b->run.route.active_count];
  int64_t end = first;
  for (*slots = 0; end < all && *slots < GROUP_SLOTS * threads;)
    for (int64_t i = 0; i < threads && end < all; i++) *slots += b->blocks[end++].count;
  return (kt_back_group){.first = first,
                         .end = end,
                         .slot = b->blocks[first].slot,
                         .whole = is_even(b, first, end, *slots, threads)};
}

/* Threads that do whole blocks leave gradients to which several blocks belong for later; one thread
 * takes them in their order. One thread takes all strips at once: each beginning costs the decoding
 * of a chunk. */
static void prepare_group(const kt_back *b, kt_back_group *g, int64_t slots, int32_t threads) {
  const kt_run *const r = &b->run;
  const int64_t blocks = g->end - g->first, middle = blocks * (r->width / KT_STRIP);
  const int64_t dx = b->want.dx ? r->moe->hidden / KT_STRIP : 0;
  const int64_t experts = b->blocks[g->end - 1].active + 1 - b->blocks[g->first].active;
  const int own = g->whole && (threads == 1 || experts == blocks);
  kt_share_init(&g->blocks, g->whole ? blocks : 0, 1, threads);
  kt_share_init(&g->rows, g->whole ? 0 : slots, 1, threads);
  kt_share_init(&g->middle, middle, threads > 1 ? 1 : middle, threads);
  kt_share_init(&g->pairs, kt_adapts_x(&b->adapter) ? blocks : 0, 1, threads);
  kt_share_init(&g->outer, own ? 0 : kt_back_outer_items(b, g), 1, threads);
  kt_share_init(&g->split, dx && b->folding == KT_FOLD_SPLIT ? slots : 0, 1, threads);
  kt_share_init(&g->dx, dx, threads > 1 ? dx / (2 * threads) : dx, threads);
}

static void prepare_team(kt_back *b, int64_t index) {
  const kt_run *const r = &b->run;
  const int32_t threads = kt_team_threads(r, index);
  const int64_t blocks = b->first_block[r->route.active_count];
  kt_barrier_init(&b->teams[index].barrier, threads);
  for (int64_t part = kt_first_part(r, index); part < kt_first_part(r, index + 1); part++) {
    b->groups = 0;
    for (int64_t first = 0, slots; first < blocks;) {
      kt_back_group *const g = b->parts[part].groups + b->groups++;
      *g = group_from(b, first, &slots);
      prepare_group(b, g, slots, threads);
      first = g->end;
    }
  }
}

static kt_status backward_batch(kt_back *b) {
  const kt_run *const r = &b->run;
  const int32_t threads = kt_pool_threads(r->pool);
  const int64_t active = r->route.active_count;
  make_blocks(b);
  kt_barrier_init(&b->run.all, threads);
  kt_share_init(&b->zeros, r->first_token ? 0 : r->moe->experts, 1, threads);
  kt_share_init(&b->rows, r->tokens, 1, threads);
  kt_share_init(&b->down, kt_adapts(&b->adapter, KT_DOWN) ? active : 0, 1, threads);
  kt_share_init(&b->finish, b->want.dx ? r->tokens : 0, 1, threads);
  kt_share_init(&b->slot_weights, b->want.dweights ? active : 0, 1, threads);
  kt_share_init(&b->last, kt_back_outer_items(b, NULL), 1, threads);
  const int last = r->first_token + r->tokens >= b->call_tokens;
  kt_share_init(&b->round, b->want.lora_bf16 && last ? r->moe->experts : 0, 1, threads);
  for (int64_t index = 0; index < r->team_count; index++) prepare_team(b, index);
  return kt_pool_run(r->pool, backward_job, b);
}

/* ---- Entry points --------------------------------------------------------------------- */

static kt_folding folding_of(const kt_back *b) {
  if (b->transposed && b->run.format->splits) return KT_FOLD_SPLIT;
  if (has_scales(b, 0)) return KT_FOLD_ROWS;
  return has_scales(b, 1) && !b->transposed ? KT_FOLD_GROUPS : KT_FOLD_NONE;
}

/* Of rows [gate | up | h]: no gate, or no h, where there is none. Strides of 4096 bytes would meet
 * in one cache set. */
static int64_t row_stride(const kt_back *b) {
  const int gated = kt_has_gate(b->run.moe->activation.function);
  return 2 * b->run.width * (1 + gated + kt_back_needs_middle(b)) + 64;
}

static kt_back start(const kt_moe *moe, const kt_lora *lora, const kt_pool *pool,
                     const kt_moe_gradients *want, int64_t tokens, int64_t top_k) {
  kt_back b = {
      .run = kt_run_of(moe, pool, tokens, top_k),
      .adapter = kt_adapter_of(moe, lora),
      .want = *want,
      .one_batch = tokens <= KT_BATCH,
      .call_tokens = tokens,
      .epilogue = KT_CELL(kt_epilogues),
      .h_stride = (int64_t)kt_rows_stride(KT_ROWS_BF16, moe->hidden, 0),
  };
  b.transpose = kt_format_transpose(b.run.format);
  b.activate = b.adapter.math->activate[moe->activation.function];
  b.transposed = kt_format_transposed(b.run.format);
  b.outer_product = kt_outer_best();
  b.folding = folding_of(&b);
  b.w_stride = row_stride(&b);
  return b;
}

/* Those whose saved bytes fit 63 bits: of a pair, gate, up, and less than that of scales; A x of
 * two matrices, and A h of each part. */
static int64_t most_tokens(const kt_moe *moe, const kt_lora *lora, int64_t top_k) {
  const int64_t rank = lora ? lora->rank : 0;
  const int64_t pair = 8 * moe->intermediate + 4 * (2 + moe->parts) * rank;
  return INT64_MAX / 2 / pair / top_k;
}

static kt_status check(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k) {
  const kt_status status = kt_check_layer(moe);
  if (status != KT_OK) return status;
  if (kt_check_batch(moe, tokens, top_k) != KT_OK || kt_check_lora(moe, lora) != KT_OK)
    return KT_ERR_ARGUMENT;
  return tokens <= most_tokens(moe, lora, top_k) ? KT_OK : KT_ERR_ARGUMENT;
}

size_t kt_train_saved_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k) {
  if (check(moe, lora, tokens, top_k) != KT_OK) return 0;
  const kt_adapter adapter = kt_adapter_of(moe, lora);
  kt_saved saved;
  return kt_saved_at(moe, &adapter, kt_larger(tokens, 1) * top_k, NULL, &saved);
}

/* All that can be wanted. */
static kt_moe_gradients everything(const kt_lora *lora, void *anything) {
  float *const some = anything;
  void *const gate = lora && lora->gate_a ? some : NULL;
  void *const up = lora && lora->up_a ? some : NULL;
  void *const down = lora && lora->down_a ? some : NULL;
  return (kt_moe_gradients){.dx = some,
                            .gate_a = gate,
                            .gate_b = gate,
                            .up_a = up,
                            .up_b = up,
                            .down_a = down,
                            .down_b = down,
                            .gate = some,
                            .up = some,
                            .down = some,
                            .lora_bf16 = lora && lora->dtype == KT_BF16};
}

size_t kt_train_scratch_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k,
                             const kt_pool *pool) {
  if (!pool || check(moe, lora, tokens, top_k) != KT_OK) return 0;
  float anything;
  const kt_moe_gradients want = everything(lora, &anything);
  kt_back b = start(moe, lora, pool, &want, tokens, top_k);
  const size_t forward =
      kt_forward_scratch_size(moe, (kt_low_rank){lora, NULL}, tokens, top_k, pool);
  const size_t backward = lay_out(&b, NULL);
  return forward > backward ? forward : backward;
}

kt_status kt_train_forward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool,
                           const kt_moe_call *call, void *saved, void *scratch,
                           size_t scratch_size) {
  if (!call || !pool) return KT_ERR_ARGUMENT;
  const kt_status status = check(moe, lora, call->tokens, call->top_k);
  if (status != KT_OK) return status;
  if (call->add) return KT_ERR_ARGUMENT;
  return kt_forward(moe, (kt_low_rank){lora, NULL}, pool, call, saved, scratch, scratch_size);
}

static kt_status check_gradients(const kt_moe *moe, const kt_lora *lora,
                                 const kt_moe_gradients *g) {
  if (!g || !g->dy || !kt_value_size(g->dy_dtype) || !kt_value_size(g->dx_dtype))
    return KT_ERR_ARGUMENT;
  const int gate = lora && lora->gate_a, up = lora && lora->up_a, down = lora && lora->down_a;
  const int fits = (gate || (!g->gate_a && !g->gate_b)) && (up || (!g->up_a && !g->up_b)) &&
                   (down || (!g->down_a && !g->down_b));
  const int base = g->gate || g->up || g->down;
  const int gated = kt_has_gate(moe->activation.function);
  if (!fits || (base && moe->layout.format != KT_FORMAT_BF16) || (g->gate && !gated))
    return KT_ERR_ARGUMENT;
  if (g->lora_bf16 < 0 || g->lora_bf16 > 1 || (g->lora_bf16 && (!lora || lora->dtype != KT_BF16)))
    return KT_ERR_ARGUMENT;
  const void *const of_lora[] = {g->gate_a, g->gate_b, g->up_a, g->up_b, g->down_a, g->down_b};
  for (size_t i = 0; i < sizeof of_lora / sizeof *of_lora; i++)
    if (!kt_aligned(of_lora[i], g->lora_bf16 ? 2 : sizeof(float))) return KT_ERR_ARGUMENT;
  const float *const outputs[] = {g->dweights, g->gate, g->up, g->down};
  for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++)
    if (!kt_aligned(outputs[i], sizeof(float))) return KT_ERR_ARGUMENT;
  const int good = kt_aligned(g->dy, kt_value_size(g->dy_dtype)) &&
                   kt_aligned(g->dx, kt_value_size(g->dx_dtype));
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

static void start_call(kt_back *b, const kt_moe_call *c, const void *saved) {
  const kt_moe *const moe = b->run.moe;
  b->x = kt_run_values(moe, c->x, c->tokens, c->x_dtype);
  b->dy = kt_run_values(moe, b->want.dy, c->tokens, b->want.dy_dtype);
  kt_saved_at(moe, &b->adapter, c->tokens * c->top_k, (void *)(uintptr_t)saved, &b->saved);
  kt_run_skip(&b->run, c);
}

/* Of no token, all that is wanted of matrices is zero. */
static kt_status no_tokens(kt_back *b) {
  b->run.route.active_count = 0;
  for (int64_t e = 0; e < b->run.moe->experts; e++) kt_back_zero(b, e);
  return KT_OK;
}

static kt_status each_batch(kt_back *b, const kt_moe_call *c, kt_status (*step)(kt_back *)) {
  kt_status status = KT_OK;
  for (int64_t first = 0; first < c->tokens && status == KT_OK; first += KT_BATCH) {
    kt_run_batch(&b->run, c, first);
    status = step(b);
  }
  return status;
}

static kt_status check_batch_experts(kt_back *b) { return kt_check_experts(&b->run); }

kt_status kt_train_backward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool,
                            const kt_moe_call *call, const void *saved,
                            const kt_moe_gradients *gradients, void *scratch, size_t scratch_size) {
  if (!call || !pool) return KT_ERR_ARGUMENT;
  const kt_status status = check(moe, lora, call->tokens, call->top_k);
  if (status != KT_OK) return status;
  if (check_gradients(moe, lora, gradients) != KT_OK) return KT_ERR_ARGUMENT;
  kt_back b = start(moe, lora, pool, gradients, call->tokens, call->top_k);
  if (call->tokens == 0) return no_tokens(&b);
  if (kt_check_inputs(call) != KT_OK || !saved || !scratch || !kt_aligned(saved, LINE) ||
      !kt_aligned(scratch, LINE))
    return KT_ERR_ARGUMENT;
  if (scratch_size < lay_out(&b, NULL)) return KT_ERR_SCRATCH;
  lay_out(&b, scratch);
  start_call(&b, call, saved);
  /* All is checked before a result is written. */
  const kt_status good = each_batch(&b, call, check_batch_experts);
  if (good != KT_OK) return good;
  const size_t pairs = (size_t)(call->tokens * call->top_k);
  if (b.want.dweights) memset(b.want.dweights, 0, pairs * sizeof(float));
  return each_batch(&b, call, backward_batch);
}
