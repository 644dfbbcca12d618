/* random_layers.h - random layers, calls of the forward and of routers. */
#ifndef KT_TEST_RANDOM_LAYERS_H
#define KT_TEST_RANDOM_LAYERS_H

#include "random_weights.h"

enum {
  POOLS = 3,
  MOST_EXPERTS = 5,
  MOST_PARTS = 3,
  BATCH = 2048 /* tokens of a job */,
  WHOLE_TOKENS = 40,
  MOST_PRODUCTS = 1 << 22 /* of numbers, with each matrix: of few tokens where a layer is large */
};

/* Sums are in another order at each level, and middles are rounded to bf16 or int8. */
static const double level_bound = 0.01;

static kt_pool *pools[POOLS];
static uint64_t forwards[MOST_LAYOUTS][MOST_LEVELS];

/* Of a layer and a call: with gate, up and down of every expert, all ids of experts, and more
 * tokens than any loop of a kernel takes at once. Counts are of these; the others may compute
 * nothing. */
static int whole;

static inline void make_pools(void) {
  static const int32_t nodes[POOLS][POOLS] = {{0}, {0, 1}, {0, 0, 1}};
  for (int i = 0; i < POOLS; i++)
    if (kt_pool_create(i + 1, NULL, nodes[i], pools + i) != KT_OK) exit(2);
}

static inline void destroy_pools(void) {
  for (int i = 0; i < POOLS; i++) kt_pool_destroy(pools[i]);
}

/* ---- Layers ------------------------------------------------------------------------- */

typedef struct layer {
  kt_moe moe;
  kt_expert *expert; /* moe's, before they are sealed */
  int exact, wild;
  int64_t absent; /* an expert without weights, or -1 */
} layer;

static inline const void *draw_packed(const layer *l, int64_t rows, int64_t cols,
                                      const void **scale) {
  const kt_layout *const layout = &l->moe.layout;
  kt_layout_traits traits;
  kt_layout_describe(layout, &traits);
  const size_t size = kt_packed_size(layout, rows, cols);
  const size_t scale_size = kt_scale_size(layout, rows, cols);
  void *const packed = room(size, 1);
  void *const packed_scale = scale_size ? room(scale_size, aligned_to(&traits)) : NULL;
  uint8_t *const codes = malloc((size_t)(rows * cols) * 2 + (size_t)(rows * cols) * 4);
  if (!codes) exit(2);
  void *const plain_scale = codes + rows * cols * 2;
  draw_codes(layout, codes, rows * cols);
  draw_scales(layout, plain_scale, rows * cols);
  EXPECTED(KT_OK, CALLED(kt_pack, layout, rows, cols, codes, scale_size ? plain_scale : NULL,
                         packed, packed_scale));
  if (l->wild && one_in(2)) draw_bytes(packed, size);
  if (l->wild && one_in(2) && scale_size) draw_bytes(packed_scale, scale_size);
  free(codes);
  *scale = packed_scale ? seal(packed_scale) : NULL;
  return seal(packed);
}

static inline const float *draw_bias(int64_t count) {
  float *const bias = room((size_t)count * sizeof *bias, sizeof *bias);
  for (int64_t i = 0; i < count; i++) bias[i] = unit();
  return seal(bias);
}

static inline void draw_expert(const layer *l, int64_t part, int biased, kt_expert *e) {
  const int64_t width = l->moe.intermediate / l->moe.parts, hidden = l->moe.hidden;
  const int gated = kt_function_has_gate(l->moe.activation.function);
  if (gated) e->gate = draw_packed(l, width, hidden, &e->gate_scale);
  e->up = draw_packed(l, width, hidden, &e->up_scale);
  e->down = draw_packed(l, hidden, width, &e->down_scale);
  if (biased && gated) e->gate_bias = draw_bias(width);
  if (biased) e->up_bias = draw_bias(width);
  if (biased && part == 0) e->down_bias = draw_bias(hidden);
}

static inline layer draw_layer(int number, int wild) {
  const kt_layout *const layout = layouts + number;
  kt_layout_traits traits;
  kt_layout_describe(layout, &traits);
  layer l = {.wild = wild, .absent = -1};
  const int64_t tile = traits.col_multiple, width = tile * (1 + below(tile < 100 ? 4 : 2));
  const int64_t parts = 1 + below(one_in(2) ? 1 : whole ? 2 : MOST_PARTS);
  const int64_t experts = 1 + below(whole ? 2 : MOST_EXPERTS);
  const int most = whole ? 2 : tile < 100 ? 7 : 3; /* tiles of a row */
  l.exact = is_integer(layout);
  l.moe = (kt_moe){.layout = *layout,
                   .activation = whole || one_in(2) ? silu : ONE_OF(others),
                   .hidden = tile * (1 + below(most)),
                   .intermediate = width * parts,
                   .experts = experts,
                   .parts = parts};
  if (!whole && one_in(5)) l.absent = below(experts);
  const size_t size = (size_t)(parts * experts) * sizeof *l.expert;
  l.expert = memset(room(size, sizeof(void *)), 0, size);
  l.moe.expert = l.expert;
  const int biased = one_in(3);
  for (int64_t i = 0; i < parts * experts; i++)
    if (i % experts != l.absent) draw_expert(&l, i / experts, biased, l.expert + i);
  EXPECTED(KT_OK, CALLED(kt_product_check, layout, l.moe.hidden, width));
  return l;
}

/* ---- Calls ----------------------------------------------------------------------------- */

typedef struct layer_call {
  kt_moe_call call;
  size_t y_size; /* bytes of the result */
  int reads_y;   /* y is x or add: it holds what is read */
  int asks_absent;
} layer_call;

static inline void *draw_values(int dtype, int64_t count, int wild) {
  uint8_t *const data = room((size_t)count * value_size(dtype), value_size(dtype));
  for (int64_t i = 0; i < count; i++) {
    const float value = wild ? 16 * draw_float(1) : unit();
    uint16_t half = bf16(value);
    if (dtype == KT_F32) memcpy(data + 4 * i, &value, 4);
    if (dtype == KT_F16) half = (uint16_t)(wild ? draw() : 0x2400 + draw() % 0x1800);
    if (dtype != KT_F32) memcpy(data + 2 * i, &half, 2);
  }
  return data;
}

static inline int skipped(const kt_moe_call *c, int64_t id) { return c->skip && c->skip[id]; }

/* Of an expert, of none, or of one that has no weights, which the call then must refuse or skip. */
static inline int64_t draw_id(const layer *l, layer_call *c) {
  static const int64_t nobody[] = {-1, INT64_MIN, INT64_MAX, INT32_MIN, INT32_MAX};
  if (!whole && one_in(6)) return one_in(2) ? l->moe.experts : ONE_OF(nobody);
  int64_t id = below(l->moe.experts);
  if (id == l->absent && !skipped(&c->call, id) && !one_in(40)) id = -1;
  return id;
}

static inline void draw_ids(const layer *l, layer_call *c) {
  kt_moe_call *const call = &c->call;
  const int64_t pairs = call->tokens * call->top_k;
  float *const weights = room((size_t)pairs * 4, 4);
  uint8_t *const ids = room((size_t)(pairs * call->id_size), (size_t)call->id_size);
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t id = draw_id(l, c);
    const int32_t half = (int32_t)id; /* another id of nobody, or 0 or -1 */
    const int64_t there = call->id_size == 4 ? half : id;
    weights[i] = l->wild ? draw_float(1) : unit();
    memcpy(ids + i * call->id_size, call->id_size == 4 ? (const void *)&half : &id,
           (size_t)call->id_size);
    if (there == l->absent && there >= 0 && !skipped(call, there)) c->asks_absent = 1;
  }
  call->ids = seal(ids), call->weights = seal(weights);
}

static inline layer_call draw_call(const layer *l) {
  static const int32_t dtypes[] = {KT_BF16, KT_F16, KT_F32};
  static const int64_t tokens[] = {0, 1, 1, 2, 3, 4, 5, 8, 9, 12, 13, 17, 25, 33};
  layer_call c = {.call = {.tokens = one_in(12) ? 100 + below(40) : ONE_OF(tokens),
                           .top_k = whole ? 1 : 1 + below(l->moe.experts + 1),
                           .id_size = one_in(2) ? 4 : 8,
                           .x_dtype = ONE_OF(dtypes),
                           .y_dtype = ONE_OF(dtypes)}};
  kt_moe_call *const call = &c.call;
  const int64_t size = l->moe.hidden * l->moe.intermediate * call->top_k;
  const int64_t most = MOST_PRODUCTS / size;
  if (call->tokens > most) call->tokens = most;
  if (whole) call->tokens = WHOLE_TOKENS;
  if (!whole && size <= 1 << 14 && one_in(6)) call->tokens = BATCH - 8 + below(20);
  const int64_t count = call->tokens * l->moe.hidden;
  if (!whole && one_in(3)) {
    uint8_t *const skip = room((size_t)l->moe.experts, 1);
    for (int64_t e = 0; e < l->moe.experts; e++) skip[e] = one_in(3) ? (uint8_t)draw() : 0;
    call->skip = seal(skip);
  }
  draw_ids(l, &c);
  call->x = seal(draw_values(call->x_dtype, count, l->wild));
  if (one_in(3)) call->add = seal(draw_values(KT_F32, count, l->wild));
  c.y_size = (size_t)count * value_size(call->y_dtype);
  c.reads_y =
      one_in(4) && (call->x_dtype == call->y_dtype || (call->add && call->y_dtype == KT_F32));
  return c;
}

static inline void describe_call(const layer *l, const layer_call *c) {
  snprintf(inputs, sizeof inputs,
           "%s, function %d, %" PRId64 " x %" PRId64 " in %" PRId64 " parts, top %" PRId64
           " of %" PRId64 ", %" PRId64 " tokens, dtypes %d and %d%s%s%s%s%s",
           layout_name(&l->moe.layout), l->moe.activation.function, l->moe.hidden,
           l->moe.intermediate, l->moe.parts, c->call.top_k, l->moe.experts, c->call.tokens,
           c->call.x_dtype, c->call.y_dtype, l->wild ? ", wild" : "", c->call.skip ? ", skips" : "",
           c->call.add ? ", add" : "", c->reads_y ? ", in place" : "",
           c->asks_absent ? ", an expert is absent" : "");
}

/* Bit by bit, but any NaN is like any other. */
static inline int same_values(int dtype, const void *a, const void *b, int64_t count) {
  if (memcmp(a, b, (size_t)count * value_size(dtype)) == 0) return 1;
  for (int64_t i = 0; i < count; i++) {
    const float x = value_at(dtype, a, i), y = value_at(dtype, b, i);
    if (memcmp(&x, &y, sizeof x) && !(isnan(x) && isnan(y))) return 0;
  }
  return 1;
}

/* How far they are apart, as a share of the size of b. */
static inline double distance(int dtype, const void *a, const void *b, int64_t count) {
  double squares = 0, size = 0;
  for (int64_t i = 0; i < count; i++) {
    const double x = (double)value_at(dtype, a, i), y = (double)value_at(dtype, b, i);
    squares += x == y ? 0 : (x - y) * (x - y), size += y * y;
  }
  return squares == 0.0 ? 0.0 : sqrt(squares / (size > 0 ? size : 1));
}

/* ---- The forward -------------------------------------------------------------------------- */

/* The call for its first `tokens` tokens, with y, which may be x or add. */
static inline kt_moe_call call_of(const layer *l, const layer_call *c, int64_t tokens) {
  kt_moe_call call = c->call;
  const size_t y_unit = value_size(call.y_dtype), size = (size_t)(tokens * l->moe.hidden) * y_unit;
  call.tokens = tokens;
  call.y = room(size, y_unit);
  if (c->reads_y && call.x_dtype == call.y_dtype)
    call.x = memcpy(call.y, call.x, size);
  else if (c->reads_y)
    call.add = memcpy(call.y, call.add, size);
  return call;
}

/* y; NULL where the call was to be refused, and was. */
static inline const void *y_of(const layer_call *c, const kt_moe_call *call, kt_status status) {
  if (call->tokens == c->call.tokens && status != (c->asks_absent ? KT_ERR_EXPERT : KT_OK))
    FAILED("forward: %s", kt_strerror(status));
  return status == KT_OK ? call->y : NULL;
}

static inline const void *forward(const layer *l, const layer_call *c, int64_t tokens,
                                  kt_pool *pool) {
  const kt_moe_call call = call_of(l, c, tokens);
  const size_t size = kt_moe_scratch_size(&l->moe, tokens, call.top_k, pool);
  counted(OF_kt_moe_scratch_size, size > 0);
  return y_of(c, &call, CALLED(kt_moe_forward, &l->moe, pool, &call, room(size, 64), size));
}

/* As the work of a task: the same bits where all experts are kept; one that fails says so. */
static inline void forward_as_work(const layer *l, const layer_call *c, const void *y) {
  kt_moe_work *const work = room(sizeof *work, sizeof(void *));
  const int64_t tokens = c->call.tokens, ids = tokens * c->call.top_k;
  const size_t unit = value_size(c->call.y_dtype);
  const size_t size = kt_moe_scratch_size(&l->moe, tokens, c->call.top_k, pools[0]);
  uint8_t *const skip = room((size_t)l->moe.experts, 1);
  int32_t failed = 0;
  *work = (kt_moe_work){.moe = &l->moe, .pool = pools[0], .call = c->call, .failures = &failed};
  work->scratch = room(size, 64), work->scratch_size = size;
  work->call.y = room((size_t)(tokens * l->moe.hidden) * unit, unit);
  if (c->call.skip) work->mask = c->call.skip, work->skip = skip, work->call.skip = skip;
  if (one_in(2)) {
    work->now = room((size_t)ids * 8, 8), work->later = room((size_t)ids * 8, 8);
    work->keep = c->call.top_k;
  }
  kt_moe_work_run(work);
  const int same = same_values(c->call.y_dtype, work->call.y, y, tokens * l->moe.hidden);
  counted(OF_kt_moe_work_run, work->status == KT_OK && failed == 0 && same);
  work->scratch_size = 0;
  kt_moe_work_run(work);
  if (tokens && (work->status != KT_ERR_SCRATCH || failed != 1)) FAILED("work: no failure");
}

/* Other threads, and fewer tokens, have the same bits. */
static inline void forward_otherwise(const layer *l, const layer_call *c, const void *y) {
  const int dtype = c->call.y_dtype, amx = strcmp(level_names[level], "amx") == 0;
  const int64_t tokens = c->call.tokens, hidden = l->moe.hidden;
  const void *const other = forward(l, c, tokens, ONE_OF(pools));
  if (!other || !same_values(dtype, other, y, tokens * hidden))
    FAILED("other bits with another pool");
  if (!c->reads_y) forward_as_work(l, c, y);
  if (!tokens || (amx && !l->exact && !whole)) return;
  const int64_t counts[] = {1 + below(tokens), 1, 3, 9};
  for (int i = 0; i < (whole ? 4 : 1); i++) {
    const void *const fewer = forward(l, c, counts[i], ONE_OF(pools));
    if (amx && !l->exact) continue;
    if (!fewer || !same_values(dtype, fewer, y, counts[i] * hidden))
      FAILED("other bits for the first %" PRId64 " tokens alone", counts[i]);
  }
}

/* Each layout twice: as a whole, and as it comes. */
static void forward_case(int case_of_round) {
  const int number = case_of_round % layout_count;
  whole = case_of_round < layout_count;
  const layer l = draw_layer(number, !whole && one_in(3));
  const layer_call c = draw_call(&l);
  const int64_t count = c.call.tokens * l.moe.hidden;
  const int dtype = c.call.y_dtype, kept_pieces = piece_count;
  uint8_t *const first = malloc(c.y_size + 1);
  if (!first) exit(2);
  seal(l.expert);
  describe_call(&l, &c);
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    const void *const y = forward(&l, &c, c.call.tokens, ONE_OF(pools));
    if (y) forward_otherwise(&l, &c, y);
    if (y && i == 0) memcpy(first, y, c.y_size);
    if (y && l.exact && !same_values(dtype, y, first, count)) FAILED("other bits than scalar");
    if (y && !l.wild && !l.exact) {
      const double off = distance(dtype, y, first, count);
      if (!(off <= level_bound)) FAILED("%g away from scalar", off);
    }
    EXPECTED(KT_OK, CALLED(kt_moe_touch, &l.moe, ONE_OF(pools)));
    forwards[number][i] += whole && y;
    release_rooms(kept_pieces);
  }
  free(first);
  whole = 0;
}

/* ---- Routers --------------------------------------------------------------------------------- */

static inline void *draw_logits(int64_t count) {
  static const float odd[] = {INFINITY, -INFINITY, NAN, -0.0f, 88.5f, -104.0f, 1e30f, -1e-40f};
  float *const logits = room((size_t)count * 4, 4);
  for (int64_t i = 0; i < count; i++)
    logits[i] = one_in(60) ? ONE_OF(odd) : (float)(below(4001) - 2000) / 128.0f;
  return logits;
}

static inline kt_router draw_router(void) {
  static const int64_t counts[] = {1, 2, 6, 15, 16, 17, 40, 96, 160, 257};
  static const float norms[] = {1.0f, 2.0f, 1.0f, 2.0f, INFINITY, 3.0f, 0.5f};
  const int64_t e = one_in(100) ? KT_MAX_ROUTED - 3 : ONE_OF(counts);
  const int scoring = (int)below(3), mixed = one_in(8);
  kt_router r = {.experts = e, .scoring = mixed ? KT_SOFTMAX : scoring, .groups = 1, .keep = 1};
  if (!mixed && e % 4 == 0 && one_in(2)) r.groups = 4, r.keep = 1 + below(4);
  const int64_t most = e / r.groups * r.keep;
  r.top_k = 1 + below(most < 9 || one_in(10) ? most : 9);
  r.sinks = r.scoring != KT_SOFTMAX && one_in(3) ? 1 + below(3) : 0;
  r.by_logits = !mixed && one_in(4), r.renormalise = !mixed && one_in(2);
  r.group_score = 1 + one_in(2), r.masked = one_in(2) ? 0.0f : -INFINITY;
  r.jitter = mixed ? 0.25f * (1 + unit()) : -1.0f;
  r.p_norm = ONE_OF(norms), r.factor = 2.5f * unit();
  r.epsilon = one_in(2) ? 0.0f : 1e-20f, r.least_sum = one_in(2) ? 0.0f : 0.01f;
  if (!mixed && one_in(2)) r.correction = seal(draw_logits(e));
  if (one_in(2)) r.expert_factor = seal(draw_logits(e));
  return r;
}

static void router_case(int number) {
  const kt_router r = draw_router();
  const int64_t tokens = number ? below(40) : 0, count = tokens * r.top_k;
  const void *const logits = seal(draw_logits(tokens * (r.experts + r.sinks)));
  int64_t *given = NULL;
  if (r.jitter < 0 && one_in(4)) {
    given = room((size_t)count * 8, 8);
    for (int64_t i = 0; i < count; i++) given[i] = below(r.experts);
    seal(given);
  }
  snprintf(inputs, sizeof inputs, "%d of %d experts, %d sinks, %d groups, scoring %d, %d tokens%s",
           (int)r.top_k, (int)r.experts, (int)r.sinks, (int)r.groups, (int)r.scoring, (int)tokens,
           given ? ", given" : "");
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    int64_t *const ids = room((size_t)count * 8, 8);
    float *const weights = room((size_t)count * 4, 4);
    const int in_place = given && one_in(2);
    if (in_place) memcpy(ids, given, (size_t)count * 8);
    EXPECTED(KT_OK, CALLED(kt_choose_experts, &r, one_in(2) ? NULL : ONE_OF(pools), tokens, logits,
                           in_place ? ids : given, ids, weights));
    for (int64_t t = 0; t < count; t++)
      if (ids[t] < 0 || ids[t] >= r.experts) FAILED("%" PRId64 " is no expert", ids[t]);
    compare(&k, 0, "experts", ids, (size_t)count * 8, 0);
    compare(&k, 1, "weights", weights, (size_t)count * 4, 1);
    release_rooms(kept_pieces);
  }
  forget(&k);
}

#endif
