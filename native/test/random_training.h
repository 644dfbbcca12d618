/* random_training.h - random forwards and backwards with LoRA. */
#ifndef KT_TEST_RANDOM_TRAINING_H
#define KT_TEST_RANDOM_TRAINING_H

#include "random_layers.h"

/* Of gradients, whose terms are rounded to bf16 more often, in whole matrices. Where tanh is nearly
 * flat, its derivative has a multiple of the error of its argument. Of 6009 gradients with AMX,
 * those through a soft cap were 0.040 away at most and others 0.015, but those of the weights of a
 * few experts 0.051, where train_check.c allows 0.07. */
static const double gradient_bound = 0.03, capped_bound = 0.06, weights_bound = 0.07;

static uint64_t trainings[MOST_LAYOUTS][MOST_LEVELS];

typedef struct training {
  layer layer;
  layer_call call;
  kt_lora lora;
  int adapted;
  const void *dy;
  int32_t dy_dtype, dx_dtype, lora_bf16;
  int wanted;                /* bits */
  int64_t counts[GRADIENTS]; /* numbers of each gradient; 0: not possible */
} training;

static inline const kt_lora *lora_of(const training *t) { return t->adapted ? &t->lora : NULL; }

static inline const void *draw_stack(const training *t, int64_t count) {
  return seal(draw_values(t->lora.dtype, t->layer.moe.experts * count, t->layer.wild && one_in(4)));
}

static inline void draw_lora(training *t) {
  static const int64_t ranks[] = {1, 2, 5, 8, 16, 31, 32, 33, 40, 64};
  const kt_moe *const moe = &t->layer.moe;
  kt_lora *const lora = &t->lora;
  const int64_t rank = ONE_OF(ranks);
  *lora = (kt_lora){.rank = rank,
                    .seed = draw(),
                    .scale = 0.5f + unit() / 4,
                    .dropout = one_in(2) ? 0.0f : 0.25f,
                    .dtype = one_in(2) ? KT_F32 : KT_BF16};
  if (kt_function_has_gate(moe->activation.function) && (whole || !one_in(3)))
    lora->gate_a = draw_stack(t, rank * moe->hidden),
    lora->gate_b = draw_stack(t, rank * moe->intermediate);
  if (whole || !one_in(3))
    lora->up_a = draw_stack(t, rank * moe->hidden),
    lora->up_b = draw_stack(t, rank * moe->intermediate);
  if (whole || !one_in(3))
    lora->down_a = draw_stack(t, rank * moe->intermediate),
    lora->down_b = draw_stack(t, rank * moe->hidden);
}

static inline void count_gradients(training *t) {
  const kt_moe *const moe = &t->layer.moe;
  const int64_t a = moe->experts * t->lora.rank, all = moe->experts * moe->hidden;
  const int64_t in = a * moe->hidden, out = a * moe->intermediate;
  const int gate = t->adapted && t->lora.gate_a, up = t->adapted && t->lora.up_a;
  const int down = t->adapted && t->lora.down_a, base = moe->layout.format == KT_FORMAT_BF16;
  const int64_t weights = base ? all * moe->intermediate : 0;
  const int64_t counts[GRADIENTS] = {
      t->call.call.tokens * moe->hidden,
      t->call.call.tokens * t->call.call.top_k,
      gate ? in : 0,
      gate ? out : 0,
      up ? in : 0,
      up ? out : 0,
      down ? out : 0,
      down ? in : 0,
      kt_function_has_gate(moe->activation.function) ? weights : 0,
      weights,
      weights,
  };
  memcpy(t->counts, counts, sizeof counts);
}

static inline training draw_training(int number, int wild) {
  static const int32_t dtypes[] = {KT_BF16, KT_F16, KT_F32};
  training t = {.layer = draw_layer(number, wild), .adapted = whole || !one_in(5)};
  t.call = draw_call(&t.layer);
  t.call.call.add = NULL, t.call.reads_y = 0;
  if (t.adapted) draw_lora(&t);
  t.dy_dtype = ONE_OF(dtypes), t.dx_dtype = ONE_OF(dtypes);
  t.dy = seal(draw_values(t.dy_dtype, t.call.call.tokens * t.layer.moe.hidden, wild));
  t.wanted = whole || one_in(2) ? -1 : (int)draw();
  t.lora_bf16 = t.adapted && t.lora.dtype == KT_BF16 && one_in(2);
  count_gradients(&t);
  seal(t.layer.expert);
  describe_call(&t.layer, &t.call);
  const size_t length = strlen(inputs);
  snprintf(inputs + length, sizeof inputs - length, ", rank %d%s%s%s%s, wanted %x",
           (int)t.lora.rank, t.lora.gate_a ? " gate" : "", t.lora.up_a ? " up" : "",
           t.lora.down_a ? " down" : "", t.lora_bf16 ? " in bf16" : "", t.wanted & 0x7ff);
  return t;
}

typedef struct trained {
  void *y, *gradient[GRADIENTS];
} trained;

static inline int dtype_of(const training *t, int which) {
  if (which == DX) return t->dx_dtype;
  return t->lora_bf16 && which >= GATE_A && which <= DOWN_B ? KT_BF16 : KT_F32;
}

static inline size_t gradient_size(const training *t, int which) {
  return (size_t)t->counts[which] * value_size(dtype_of(t, which));
}

static inline kt_moe_gradients pointers(const training *t, trained *r) {
  const kt_moe_gradients g = {
      .dy = t->dy, .dy_dtype = t->dy_dtype, .dx_dtype = t->dx_dtype, .lora_bf16 = t->lora_bf16};
  return with_gradients(g, r->gradient);
}

/* Both; whether they were not refused. */
static inline int train(const training *t, kt_pool *pool, trained *r) {
  const kt_moe *const moe = &t->layer.moe;
  kt_moe_call call = t->call.call;
  const size_t saved_size = kt_train_saved_size(moe, lora_of(t), call.tokens, call.top_k);
  const size_t size = kt_train_scratch_size(moe, lora_of(t), call.tokens, call.top_k, pool);
  counted(OF_kt_train_saved_size, saved_size > 0), counted(OF_kt_train_scratch_size, size > 0);
  void *const saved = room(saved_size, 64);
  *r = (trained){.y = room(t->call.y_size, value_size(call.y_dtype))};
  for (int i = 0; i < GRADIENTS; i++)
    if (t->counts[i] && t->wanted >> i & 1)
      r->gradient[i] = room(gradient_size(t, i), value_size(dtype_of(t, i)));
  call.y = r->y;
  const kt_status wanted = t->call.asks_absent ? KT_ERR_EXPERT : KT_OK;
  const kt_moe_gradients g = pointers(t, r);
  EXPECTED(wanted,
           CALLED(kt_train_forward, moe, lora_of(t), pool, &call, saved, room(size, 64), size));
  seal(saved);
  call.y = NULL;
  EXPECTED(wanted, CALLED(kt_train_backward, moe, lora_of(t), pool, &call, saved, &g,
                          room(size, 64), size));
  return wanted == KT_OK;
}

/* The length of a gradient. */
static inline double length_of(const training *t, const trained *r, int which) {
  double squares = 0;
  for (int64_t i = 0; i < t->counts[which]; i++)
    squares += pow((double)value_at(dtype_of(t, which), r->gradient[which], i), 2);
  return sqrt(squares);
}

static inline const void *with_other_signs(const void *data, int dtype, int64_t count) {
  const size_t unit_size = value_size(dtype), size = (size_t)count * unit_size;
  if (!data) return NULL;
  uint8_t *const other = memcpy(room(size, unit_size), data, size);
  for (size_t i = unit_size - 1; i < size; i += unit_size) other[i] ^= (uint8_t)(draw() >> 8 & 128);
  return seal(other);
}

/* How long a gradient is with other signs of dy and of LoRA, a mean at scalar: where the terms of
 * the sums in it do not happen to cancel. A routing weight's is one sum, and a rank's is another
 * that the whole row is a multiple of. What rounds its terms does not know, and moves what is left
 * by a share of this length. */
static inline double usual_length(const training *given, int which) {
  enum { DRAWS = 8 };
  const uint64_t kept_state = state;
  const int kept_level = level;
  double squares = 0;
  use_level(0);
  for (int n = 0; n < DRAWS; n++) {
    const int kept_pieces = piece_count;
    const int64_t rank = given->lora.rank * given->layer.moe.experts;
    const int64_t hidden = rank * given->layer.moe.hidden;
    const int64_t inner = rank * given->layer.moe.intermediate;
    training t = *given;
    kt_lora *const l = &t.lora;
    trained r;
    t.wanted = 1 << which;
    t.dy = with_other_signs(t.dy, t.dy_dtype, t.call.call.tokens * t.layer.moe.hidden);
    l->gate_a = with_other_signs(l->gate_a, l->dtype, hidden);
    l->gate_b = with_other_signs(l->gate_b, l->dtype, inner);
    l->up_a = with_other_signs(l->up_a, l->dtype, hidden);
    l->up_b = with_other_signs(l->up_b, l->dtype, inner);
    l->down_a = with_other_signs(l->down_a, l->dtype, inner);
    l->down_b = with_other_signs(l->down_b, l->dtype, hidden);
    if (train(&t, pools[0], &r)) squares += pow(length_of(&t, &r, which), 2) / DRAWS;
    release_rooms(kept_pieces);
  }
  use_level(kept_level);
  state = kept_state;
  return sqrt(squares);
}

/* How far a gradient is from that of scalar, as a share of its length, or the usual one if that is
 * longer. Of 189 draws of one token and rank 1, three gradients were 0.037 to 0.125 of their own
 * lengths away, and 0.0026 to 0.0046 of usual ones, which is what the truth allows
 * (train_check.c). */
static inline double gradient_distance(const training *t, const trained *r, const trained *first,
                                       int which) {
  const double off =
      distance(dtype_of(t, which), r->gradient[which], first->gradient[which], t->counts[which]);
  if (off <= gradient_bound || !isfinite(off)) return off;
  const double own = length_of(t, first, which), usual = usual_length(t, which);
  return usual > own ? off * (own > 0 ? own : 1) / usual : off;
}

static inline double bound_of(const training *t, int which) {
  const int capped = t->layer.moe.activation.function == KT_SOFTCAP;
  return which == DWEIGHTS ? weights_bound : capped ? capped_bound : gradient_bound;
}

static inline void expect_gradients(const training *t, const trained *r, const trained *first,
                                    int bits) {
  for (int i = 0; i < GRADIENTS; i++) {
    if (!r->gradient[i]) continue;
    const int dtype = dtype_of(t, i);
    if (bits && !same_values(dtype, r->gradient[i], first->gradient[i], t->counts[i]))
      FAILED("gradient %d has other bits with another pool", i);
    if (bits) continue;
    const double off = gradient_distance(t, r, first, i), bound = bound_of(t, i);
    if (!(off <= bound)) FAILED("gradient %d is %g away from scalar", i, off);
  }
}

static inline void keep_trained(const training *t, const trained *r, trained *first) {
  for (int i = 0; i < GRADIENTS; i++) {
    first->gradient[i] = r->gradient[i] ? malloc(gradient_size(t, i) + 1) : NULL;
    if (first->gradient[i]) memcpy(first->gradient[i], r->gradient[i], gradient_size(t, i));
  }
}

/* A limit cuts derivatives where numbers lie beyond it, which differs from level to level. */
static inline void train_at_levels(const training *given, int number) {
  const training t = *given;
  const int comparable = !t.layer.wild && t.layer.moe.activation.limit == INFINITY;
  const int kept_pieces = piece_count;
  trained first = {0};
  for (int i = 0; i < level_count; i++) {
    trained r, other;
    use_level(i);
    const int trained_once = train(&t, ONE_OF(pools), &r);
    if (trained_once && one_in(2) && train(&t, ONE_OF(pools), &other)) {
      expect_gradients(&t, &other, &r, 1);
      if (!same_values(t.call.call.y_dtype, other.y, r.y, t.call.call.tokens * t.layer.moe.hidden))
        FAILED("y has other bits with another pool");
    }
    if (trained_once && i == 0) keep_trained(&t, &r, &first);
    if (trained_once && comparable) expect_gradients(&t, &r, &first, 0);
    trainings[number][i] += whole != 0;
    release_rooms(kept_pieces);
  }
  for (int i = 0; i < GRADIENTS; i++) free(first.gradient[i]);
}

static void training_case(int case_of_round) {
  const int number = case_of_round % layout_count;
  whole = case_of_round < layout_count;
  const training t = draw_training(number, !whole && one_in(4));
  train_at_levels(&t, number);
  whole = 0;
}

#endif
