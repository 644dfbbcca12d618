/* train_problem.h - random layers with LoRA, and calls of the library with memory of just the size
 * that it asks for, spoilt before. */
#ifndef KT_TEST_TRAIN_PROBLEM_H
#define KT_TEST_TRAIN_PROBLEM_H

#include "train_truth.h"

#include <stdio.h>

enum { FOR_GATE = 1, FOR_UP = 2, FOR_DOWN = 4, FOR_ALL = 7 };

typedef struct trial {
  int kind;
  kt_activation activation;
  int biased;
  int64_t hidden, width, parts, tokens, rank;
  int adapted; /* FOR_... */
  float dropout;
  int32_t lora_dtype, x_dtype, y_dtype, dy_dtype, dx_dtype, id_size;
  int skips;
} trial;

/* ---- Numbers in memory ---------------------------------------------------------- */

/* `count` numbers of -1 .. 1; halves are k / 1024, of which bf16 does not have all. *rounded: what
 * bf16 makes of them. */
static inline void *draw_values(int dtype, int64_t count, float most, float **rounded_values) {
  void *data = guarded((size_t)count * value_size(dtype));
  float *values = *rounded_values = malloc((size_t)count * sizeof *values);
  if (!values) exit(2);
  for (int64_t i = 0; i < count; i++) {
    if (dtype == KT_F32) ((float *)data)[i] = most * unit();
    if (dtype == KT_BF16) ((uint16_t *)data)[i] = nearest_bf16(most * unit());
    if (dtype == KT_F16)
      ((uint16_t *)data)[i] = (uint16_t)(0x2400 + draw() % 0x1800) | (uint16_t)(draw() & 0x8000);
    values[i] = wide(nearest_bf16(value_at(dtype, data, i)));
  }
  return data;
}

/* ---- A problem -------------------------------------------------------------------- */

/* Experts 0 to 2, the latter twice as often; 3 has no token. Ids of nobody, twice the same, and
 * with skips those of expert 1 count as -1. */
static inline void draw_ids(problem *p, const trial *t) {
  const int64_t pairs = t->tokens * TOP_K;
  void *const ids = guarded((size_t)(pairs * t->id_size));
  float *const weights = guarded((size_t)pairs * sizeof *weights);
  p->ids = malloc((size_t)pairs * sizeof *p->ids);
  if (!p->ids) exit(2);
  for (int64_t i = 0; i < pairs; i++) {
    static const int32_t given[] = {2, 0, 1, 2, -1, EXPERTS, 0, 1};
    const int32_t id = i < 2 ? (int32_t)(2 * i) : given[draw() % 8];
    if (t->id_size == 4) ((int32_t *)ids)[i] = id;
    if (t->id_size == 8) ((int64_t *)ids)[i] = id == EXPERTS ? INT64_MIN : id;
    weights[i] = unit();
    p->ids[i] = id == EXPERTS || (t->skips && id == 1) ? -1 : id;
  }
  p->call.ids = ids, p->call.weights = weights;
  if (!t->skips) return;
  uint8_t *const skip = guarded(EXPERTS);
  memcpy(skip, (const uint8_t[EXPERTS]){0, 9, 0, 0}, EXPERTS);
  p->call.skip = skip;
}

static inline void draw_lora(problem *p, const trial *t) {
  const void **const to[] = {[GATE_A] = &p->lora.gate_a, [GATE_B] = &p->lora.gate_b,
                             [UP_A] = &p->lora.up_a,     [UP_B] = &p->lora.up_b,
                             [DOWN_A] = &p->lora.down_a, [DOWN_B] = &p->lora.down_b};
  p->lora.rank = t->rank;
  p->lora.seed = draw();
  p->lora.scale = 1.5f;
  p->lora.dropout = t->dropout;
  p->lora.dtype = t->lora_dtype;
  for (int which = GATE_A; which <= DOWN_B; which++)
    if (t->adapted >> (which - GATE_A) / 2 & 1)
      *to[which] = draw_values(t->lora_dtype, EXPERTS * size_of_matrix(p, which),
                               which % 2 ? 0.25f : 0.125f, &p->matrix[which]);
}

static inline void make_problem(const trial *t, problem *p) {
  *p = (problem){.moe = {.layout = kinds[t->kind].layout,
                         .activation = t->activation,
                         .hidden = t->hidden,
                         .intermediate = t->width * t->parts,
                         .experts = EXPERTS,
                         .parts = t->parts,
                         .expert = p->experts}};
  for (int64_t i = 0; i < t->parts * EXPERTS; i++)
    p->values[i] = make_expert(&p->moe, t->biased, i / EXPERTS, p->experts + i);
  p->call = (kt_moe_call){.tokens = t->tokens,
                          .top_k = TOP_K,
                          .id_size = t->id_size,
                          .x_dtype = t->x_dtype,
                          .y_dtype = t->y_dtype};
  p->call.x = draw_values(t->x_dtype, t->tokens * t->hidden, 1.0f, &p->x);
  p->gradients.dy = draw_values(t->dy_dtype, t->tokens * t->hidden, 1.0f, &p->dy);
  p->gradients.dy_dtype = t->dy_dtype, p->gradients.dx_dtype = t->dx_dtype;
  draw_ids(p, t);
  draw_lora(p, t);
}

static inline void free_problem(const problem *p) {
  for (int64_t i = 0; i < p->moe.parts * EXPERTS; i++) free_values(p->values[i]);
  for (int which = 0; which < GRADIENTS; which++) free(p->matrix[which]);
  free(p->x);
  free(p->dy);
  free(p->ids);
  free(p->keeps_x);
  free(p->keeps_middle);
}

static const kt_lora *lora_of(const problem *p) { return p->lora.rank ? &p->lora : NULL; }

/* ---- Results ------------------------------------------------------------------------ */

typedef struct result {
  void *y, *gradient[GRADIENTS]; /* NULL: not possible, or not wanted */
} result;

static inline int is_possible(const problem *p, int which) {
  if (which >= GATE_A && which <= DOWN_B) return p->matrix[which] != NULL;
  if (which == GATE && !kt_function_has_gate(p->moe.activation.function)) return 0;
  return which < GATE || p->moe.layout.format == KT_FORMAT_BF16;
}

/* Numbers of a gradient. */
static inline int64_t count_of(const problem *p, int which) {
  if (which == DX) return p->call.tokens * p->moe.hidden;
  return which == DWEIGHTS ? pairs_of(p) : EXPERTS * size_of_matrix(p, which);
}

static inline int dtype_of(const problem *p, int which) {
  if (which == DX) return p->gradients.dx_dtype;
  return p->gradients.lora_bf16 && which >= GATE_A && which <= DOWN_B ? KT_BF16 : KT_F32;
}

static inline size_t bytes_of(const problem *p, int which) {
  return (size_t)count_of(p, which) * value_size(dtype_of(p, which));
}

static inline size_t y_bytes(const problem *p) {
  return (size_t)(p->call.tokens * p->moe.hidden) * value_size(p->call.y_dtype);
}

/* Room for those gradients of `wanted` (bits) that are possible. */
static inline result make_result(const problem *p, int wanted) {
  result r = {.y = guarded(y_bytes(p))};
  for (int which = 0; which < GRADIENTS; which++)
    if (is_possible(p, which) && wanted >> which & 1)
      r.gradient[which] = guarded(bytes_of(p, which));
  return r;
}

static inline void release_result(const problem *p, const result *r) {
  release(r->y, y_bytes(p));
  for (int which = 0; which < GRADIENTS; which++)
    if (r->gradient[which]) release(r->gradient[which], bytes_of(p, which));
}

/* NaN everywhere. */
static inline void spoil(const problem *p, const result *r) {
  memset(r->y, 0xff, y_bytes(p));
  for (int which = 0; which < GRADIENTS; which++)
    if (r->gradient[which]) memset(r->gradient[which], 0xff, bytes_of(p, which));
}

static inline kt_moe_gradients pointers(const problem *p, const result *r) {
  return with_gradients(p->gradients, r->gradient);
}

/* Memory of the sizes that the library asks for, full of NaN. */
typedef struct room {
  void *saved, *scratch;
  size_t saved_size, scratch_size;
} room;

static inline room make_room(const problem *p, const kt_pool *pool) {
  room r = {.saved_size = kt_train_saved_size(&p->moe, lora_of(p), p->call.tokens, TOP_K),
            .scratch_size =
                kt_train_scratch_size(&p->moe, lora_of(p), p->call.tokens, TOP_K, pool)};
  if (!r.saved_size || r.saved_size % 64 || !r.scratch_size || r.scratch_size % 64) failures++;
  r.saved = memset(guarded(r.saved_size), 0xff, r.saved_size);
  r.scratch = memset(guarded(r.scratch_size), 0xff, r.scratch_size);
  return r;
}

static inline void release_room(const room *r) {
  release(r->saved, r->saved_size);
  release(r->scratch, r->scratch_size);
}

static inline kt_status forward(const problem *p, kt_pool *pool, const room *m, void *saved,
                                void *y) {
  kt_moe_call call = p->call;
  call.y = y;
  return kt_train_forward(&p->moe, lora_of(p), pool, &call, saved, m->scratch, m->scratch_size);
}

static inline kt_status backward(const problem *p, kt_pool *pool, const room *m, const result *r) {
  const kt_moe_gradients g = pointers(p, r);
  return kt_train_backward(&p->moe, lora_of(p), pool, &p->call, m->saved, &g, m->scratch,
                           m->scratch_size);
}

/* Both, into `r`. */
static inline void compute(const problem *p, kt_pool *pool, const result *r) {
  const room m = make_room(p, pool);
  spoil(p, r);
  kt_status status = forward(p, pool, &m, m.saved, r->y);
  memset(m.scratch, 0xff, m.scratch_size);
  if (status == KT_OK) status = backward(p, pool, &m, r);
  if (status != KT_OK) {
    printf("FAILED: %s\n", kt_strerror(status));
    failures++;
  }
  release_room(&m);
}

/* ---- What differed ------------------------------------------------------------------ */

static const char *const names[GRADIENTS] = {
    "dx", "dweights", "gate A", "gate B", "up A", "up B", "down A", "down B", "gate", "up", "down"};

static inline void fail(const trial *t, const char *what, double error) {
  printf("FAILED: %s, function %d, level %s, %d tokens, %d x %d in %d parts, rank %d: %s, %g\n",
         kinds[t->kind].name, t->activation.function, kt_isa_name(kt_isa_active()), (int)t->tokens,
         (int)t->hidden, (int)(t->width * t->parts), (int)t->parts, (int)t->rank, what, error);
  failures++;
}

/* Bit by bit, of what both have. */
static inline void expect_same(const trial *t, const problem *p, const result *a, const result *b,
                               const char *when) {
  if (memcmp(a->y, b->y, y_bytes(p))) fail(t, when, 0);
  for (int which = 0; which < GRADIENTS; which++)
    if (a->gradient[which] && b->gradient[which] &&
        memcmp(a->gradient[which], b->gradient[which], bytes_of(p, which))) {
      printf("%s: ", names[which]);
      fail(t, when, 0);
    }
}

/* Gradients of LoRA in bf16 are those of `exact`, rounded, and all other results are the same. */
static inline void expect_rounded(const trial *t, const problem *p, kt_pool *pool,
                                  const result *exact) {
  problem rounded = *p;
  rounded.gradients.lora_bf16 = 1;
  const result r = make_result(&rounded, -1);
  compute(&rounded, pool, &r);
  for (int which = 0; which < GRADIENTS; which++) {
    if (!r.gradient[which]) continue;
    if (which < GATE_A || which > DOWN_B) {
      if (memcmp(r.gradient[which], exact->gradient[which], bytes_of(p, which)))
        fail(t, "a result beside gradients in bf16", 0);
      continue;
    }
    const uint16_t *const found = r.gradient[which];
    const float *const right = exact->gradient[which];
    for (int64_t i = 0; i < count_of(p, which); i++) {
      if (found[i] == nearest_bf16(right[i])) continue;
      printf("%s: ", names[which]);
      fail(t, "a gradient in bf16", (double)wide(found[i]));
      break;
    }
  }
  release_result(&rounded, &r);
}

#endif
