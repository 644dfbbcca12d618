/* random_adapted.h - random adapters at inference. */
#ifndef KT_TEST_RANDOM_ADAPTED_H
#define KT_TEST_RANDOM_ADAPTED_H

#include "random_layers.h"

enum { MOST_ADAPTERS = 3, PAIRS = 3, ADAPTED_REFUSALS = 18 };

typedef struct adapted {
  layer layer;
  layer_call call;
  kt_adapters adapters;
  kt_lora_pair *pair;       /* of adapters, before they are sealed */
  const int32_t *of_tokens; /* the adapter of each token, or NULL */
} adapted;

static inline int32_t adapter_of(const kt_adapters *a, int64_t token) {
  return a->of_token ? a->of_token[token] : a->all;
}

static inline const void *draw_low_rank(const layer *l, int64_t rows, int64_t cols) {
  const int32_t dtype = one_in(2) ? KT_F32 : KT_BF16;
  const size_t size = kt_lora_packed_size(rows, cols);
  void *const packed = room(size, 1);
  const void *const matrix = seal(draw_values(dtype, rows * cols, l->wild && one_in(4)));
  EXPECTED(KT_OK, CALLED(kt_lora_pack, dtype, matrix, rows, cols, packed));
  return seal(packed);
}

/* Of rank 0 nothing else counts. */
static inline void draw_pair(const layer *l, int projection, int64_t rank, kt_lora_pair *pair) {
  static const int64_t ranks[] = {1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 40, 64, KT_MAX_RANK};
  const int64_t hidden = l->moe.hidden, inner = l->moe.intermediate;
  const int has_one = projection || kt_function_has_gate(l->moe.activation.function);
  int64_t own = has_one && !one_in(5) ? ONE_OF(ranks) : 0;
  if (own > rank) own = rank;
  *pair = (kt_lora_pair){.a = &pair->rank, .scale = NAN};
  if (own == 0) return;
  pair->a = draw_low_rank(l, own, projection == 2 ? inner : hidden);
  pair->b = draw_low_rank(l, projection == 2 ? hidden : inner, own);
  pair->scale = unit() / 8, pair->rank = (int32_t)own;
}

static inline void draw_adapters(adapted *d) {
  const int64_t count = 1 + below(MOST_ADAPTERS), experts = d->layer.moe.experts;
  const int64_t tokens = d->call.call.tokens, pairs = count * experts * PAIRS;
  const int64_t rank = one_in(6) ? KT_MAX_RANK : 1 + below(40);
  int32_t *of_token = one_in(3) ? NULL : room((size_t)tokens * sizeof *of_token, sizeof *of_token);
  d->pair = room((size_t)pairs * sizeof *d->pair, sizeof(void *));
  for (int64_t i = 0; i < pairs; i++) draw_pair(&d->layer, (int)(i % PAIRS), rank, d->pair + i);
  for (int64_t t = 0; of_token && t < tokens; t++) of_token[t] = (int32_t)below(count + 1) - 1;
  d->adapters = (kt_adapters){.count = count,
                              .rank = rank,
                              .pair = d->pair,
                              .of_token = of_token,
                              .all = (int32_t)below(count + 1) - 1};
}

static inline adapted draw_adapted(int number, int wild) {
  adapted d = {.layer = draw_layer(number, wild)};
  d.call = draw_call(&d.layer);
  draw_adapters(&d);
  seal(d.layer.expert);
  describe_call(&d.layer, &d.call);
  const size_t length = strlen(inputs);
  snprintf(inputs + length, sizeof inputs - length, ", %d adapters%s, rank %d",
           (int)d.adapters.count, d.adapters.of_token ? " of tokens" : "", (int)d.adapters.rank);
  return d;
}

static inline const void *serve(const adapted *d, const kt_adapters *a, int64_t tokens,
                                kt_pool *pool) {
  const kt_moe *const moe = &d->layer.moe;
  const kt_moe_call call = call_of(&d->layer, &d->call, tokens);
  const size_t size = kt_adapted_scratch_size(moe, a, tokens, call.top_k, pool);
  counted(OF_kt_adapted_scratch_size, size > 0);
  return y_of(&d->call, &call,
              CALLED(kt_adapted_forward, moe, a, pool, &call, room(size, 64), size));
}

/* Rows of tokens that have adapter `number`. */
static inline void expect_rows(const adapted *d, const void *y, const void *alone, int32_t number,
                               const char *what) {
  const int dtype = d->call.call.y_dtype;
  const int64_t hidden = d->layer.moe.hidden;
  const size_t row = (size_t)hidden * value_size(dtype);
  for (int64_t t = 0; t < d->call.call.tokens; t++) {
    const size_t at = (size_t)t * row;
    if (adapter_of(&d->adapters, t) != number) continue;
    if (!same_values(dtype, (const uint8_t *)y + at, (const uint8_t *)alone + at, hidden)) {
      FAILED("token %" PRId64 ": %s", t, what);
      return;
    }
  }
}

/* Other threads, and each adapter for all tokens, have the same bits; so has a call without. */
static inline void serve_otherwise(const adapted *d, const void *y) {
  const int64_t tokens = d->call.call.tokens;
  kt_adapters one = d->adapters;
  const void *const other = serve(d, &one, tokens, ONE_OF(pools));
  if (!other || !same_values(d->call.call.y_dtype, other, y, tokens * d->layer.moe.hidden))
    FAILED("other bits with another pool");
  one.of_token = NULL, one.all = (int32_t)below(one.count);
  const void *const alone = serve(d, &one, tokens, ONE_OF(pools));
  if (alone) expect_rows(d, y, alone, one.all, "other bits than with its adapter alone");
  const void *const plain = forward(&d->layer, &d->call, tokens, ONE_OF(pools));
  if (plain) expect_rows(d, y, plain, -1, "other bits than without adapters");
}

/* Each layout twice: as a whole, and as it comes. */
static void adapted_case(int case_of_round) {
  whole = case_of_round < layout_count;
  const adapted d = draw_adapted(case_of_round % layout_count, !whole && one_in(4));
  const layer *const l = &d.layer;
  const int64_t count = d.call.call.tokens * l->moe.hidden;
  const int dtype = d.call.call.y_dtype, kept_pieces = piece_count;
  uint8_t *const first = malloc(d.call.y_size + 1);
  if (!first) exit(2);
  seal(d.pair), seal(d.adapters.of_token);
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    const void *const y = serve(&d, &d.adapters, d.call.call.tokens, ONE_OF(pools));
    if (y) serve_otherwise(&d, y);
    if (y && i == 0) memcpy(first, y, d.call.y_size);
    if (y && l->exact && !same_values(dtype, y, first, count)) FAILED("other bits than scalar");
    if (y && !l->wild && !l->exact) {
      const double off = distance(dtype, y, first, count);
      if (!(off <= level_bound)) FAILED("%g away from scalar", off);
    }
    release_rooms(kept_pieces);
  }
  free(first);
  whole = 0;
}

/* ---- What is refused --------------------------------------------------------------------- */

/* A pair of an expert that a token with an adapter has. */
static inline kt_lora_pair *pair_in_use(const adapted *d, int projection) {
  const kt_moe_call *const call = &d->call.call;
  for (int64_t i = 0; i < call->tokens * call->top_k; i++) {
    const int32_t number = adapter_of(&d->adapters, i / call->top_k);
    int64_t id;
    if (call->id_size == 4)
      id = ((const int32_t *)call->ids)[i];
    else
      id = ((const int64_t *)call->ids)[i];
    if (number >= 0 && id >= 0 && id < d->layer.moe.experts && !skipped(call, id))
      return d->pair + (number * d->layer.moe.experts + id) * PAIRS + projection;
  }
  return NULL;
}

static inline void pack_refused(void) {
  void *const packed = room(64, 1);
  const void *const matrix = room(64, 4);
  const int64_t none = one_in(2) ? absurd() : (int64_t)1 << 31;
  REFUSED_CALL(CALLED(kt_lora_pack, one_in(2) ? KT_F16 : no_number(), matrix, 4, 4, packed));
  REFUSED_CALL(CALLED(kt_lora_pack, KT_F32, NULL, 4, 4, packed));
  REFUSED_CALL(CALLED(kt_lora_pack, KT_F32, matrix, 4, 4, NULL));
  REFUSED_CALL(CALLED(kt_lora_pack, KT_F32, matrix, none, 4, packed));
  REFUSED_CALL(CALLED(kt_lora_pack, KT_BF16, matrix, 4, none, packed));
  REFUSED_CALL(CALLED(kt_lora_pack, KT_F32, (const uint8_t *)matrix + 2, 2, 2, packed));
  if (kt_lora_packed_size(none, 1) || kt_lora_packed_size(1, none)) FAILED("a size of none");
}

/* Changes one thing about adapters. 1: there is no such thing about these. */
static inline int spoil_adapters(adapted *d, int number, int32_t *of_token) {
  kt_adapters *const a = &d->adapters;
  const int64_t token = below(d->call.call.tokens);
  kt_lora_pair *const pair = pair_in_use(d, number == 11 ? 0 : (int)below(2) + 1);
  if (number > 10 && !pair) return 1;
  if (number > 11 && pair->rank == 0) return 1;
  memcpy(of_token, a->of_token ? a->of_token : of_token, (size_t)d->call.call.tokens * 4);
  switch (number) {
  case 0: a->count = absurd(); break;
  case 1: a->count = (int64_t)1 << 31; break;
  case 2: a->rank = absurd(); break;
  case 3: a->rank = one_in(2) ? huge() : KT_MAX_RANK + 1; break;
  case 4: a->pair = NULL; break;
  case 5: a->pair = (const void *)((const uint8_t *)a->pair + 4); break;
  case 6: a->of_token = (const void *)((const uint8_t *)of_token + 2); break;
  case 7: of_token[token] = (int32_t)a->count, a->of_token = of_token; break;
  case 8: of_token[token] = one_in(2) ? -2 : INT32_MIN, a->of_token = of_token; break;
  case 9: a->all = (int32_t)a->count, a->of_token = NULL; break;
  case 10: a->all = one_in(2) ? -2 : INT32_MIN, a->of_token = NULL; break;
  case 11:
    if (kt_function_has_gate(d->layer.moe.activation.function)) return 1;
    *pair = (kt_lora_pair){of_token, of_token, 1.0f, 1};
    break;
  case 12: pair->rank = -1 - (int32_t)below(9); break;
  case 13: pair->rank = (int32_t)a->rank + 1; break;
  case 14: pair->a = NULL; break;
  case 15: pair->b = NULL; break;
  case 16: pair->scale = NAN; break;
  default: pair->scale = one_in(2) ? INFINITY : -INFINITY;
  }
  return 0;
}

static void adapted_refusal_case(int number) {
  adapted d = draw_adapted((int)below(layout_count), 0);
  kt_moe_call call = d.call.call;
  pack_refused();
  if (!call.tokens || d.call.asks_absent) return; /* too little to refuse */
  use_level((int)below(level_count));
  kt_pool *const pool = ONE_OF(pools);
  const size_t size =
      kt_adapted_scratch_size(&d.layer.moe, &d.adapters, call.tokens, call.top_k, pool);
  void *const scratch = room(size, 64), *const y = call.y = room(d.call.y_size, 4);
  int32_t *const of_token = room((size_t)(call.tokens + 1) * 4, 4);
  memset(of_token, 0xff, (size_t)(call.tokens + 1) * 4);
  memset(y, 0x77, d.call.y_size);
  if (spoil_adapters(&d, number, of_token)) return;
  const size_t length = strlen(inputs);
  snprintf(inputs + length, sizeof inputs - length, ": adapters %d", number);
  const kt_status status =
      CALLED(kt_adapted_forward, &d.layer.moe, &d.adapters, pool, &call, scratch, size);
  if (status != KT_ERR_ARGUMENT) FAILED("adapters: %s", kt_strerror(status));
  if (!is_untouched(y, d.call.y_size)) FAILED("a refused call has written results");
}

#endif
