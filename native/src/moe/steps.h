/* steps.h - a forward in progress, and the two steps of it that multiply (inner.c, down.c).
 *
 * Experts are computed in groups, one after the other, so that what the second step reads is still
 * in the caches of those who wrote it: of many tokens two for each thread, of few as many as have
 * some tokens for each.
 * Products are streamed where the format can do it (beside.h): one strip at a time, whose sums are
 * worked on within the products of the next; else in calls of several strips. */
#ifndef KT_STEPS_H
#define KT_STEPS_H

#include "../lora/served.h"
#include "../train/adapted.h"
#include "beside.h"

/* Experts active[first] .. active[end - 1] of the batch, and what the threads of a team share of
 * them for one part. Slots are counted from `slot` on in the team's memory of the middle. */
typedef struct kt_group {
  int64_t first, end, slot;
  int64_t pieces; /* of an expert's slots, in which A h is computed; 0: there is none */
  kt_share *inner, *middle, *down; /* of each thread */
} kt_group;

typedef struct kt_part_work {
  kt_group *groups;
  float *partial; /* [tokens, hidden] */
} kt_part_work;

typedef struct kt_team {
  kt_barrier barrier;
  kt_share rows;
  int64_t threads;
  uint8_t *x_rows;   /* [tokens] activation rows of x */
  float *middle;     /* [slots of a group, w] */
  uint8_t *mid_rows; /* [slots of a group] activation rows of the middle */
  kt_adapted_team adapted;
  kt_served_rows served; /* of down, slots of a group */
} kt_team;

/* Memory of one thread. `gathered` remembers which rows lie in `gather`. */
typedef struct kt_worker {
  uint8_t *gather;  /* [most_tokens] activation rows of x */
  float *sums;      /* [2][KT_MAX_PRODUCTS][KT_STRIP], or [4][KT_STREAM_TOKENS][KT_STRIP] */
  uint8_t *panel;   /* KT_PANEL_SIZE */
  float *plus;      /* as large, where adapters serve: what they add to those sums */
  float *values;    /* one row of x or y as binary32 */
  uint8_t *ring;    /* KT_BESIDE_RING + KT_BESIDE_SPARE */
  int64_t gathered; /* first slot, or -1 */
  int64_t rank;     /* in the team */
  kt_lora_worker lora;
  /* Streams: what is beside a product, and the work on the sums of the strip before. */
  kt_beside beside;
  int64_t strip_number; /* whose parity chooses among sums, and what is known of them */
  int64_t at_work;      /* parity of the strip before */
  kt_activate_fn *activate;
  const kt_activation *activation;
  const kt_epilogue *epilogue;
  kt_inner inner[2]; /* never copied: loads of what was just stored in parts wait for tile stores */
  kt_weighted weighted[2];
  const kt_gradients *math; /* for `keep` */
  kt_keep keep[2];          /* gate and up of the strip before, where they are kept */
} kt_worker;

typedef struct kt_forward_run {
  kt_run run;
  const kt_epilogue *epilogue;
  kt_product_fn *product;
  kt_stream_fn *stream; /* NULL: no products are streamed */
  kt_rows_kind rows_kind;
  kt_activate_fn *activate;
  kt_share finish;
  kt_team **teams;
  kt_part_work *parts;
  const float **partials; /* those of all parts */
  kt_worker **workers;
  int64_t groups;
  int64_t most_tokens;  /* of a block */
  int64_t least_tokens; /* of one that is streamed */
  int64_t down_strips;  /* of an item */
  int64_t down_together;
  int64_t x_stride, mid_stride, partial_stride;
  kt_decode_rows_fn *read;
  kt_matrix x; /* of the whole call, to be rounded to bf16 */
  const float *add;
  uint8_t *y;
  size_t y_size; /* bytes of a row */
  int y_dtype;
  kt_adapted adapted;
  kt_served served;
} kt_forward_run;

/* Items of a step that a thread takes: runs of neighbours, of its own share first, then of what
 * others have left. So one thread has an expert's first step and its rows, and not every thread
 * copies its tokens; and in all groups it adds to the same columns, which are then in no other
 * core's cache. It looks one item ahead. */
typedef struct kt_cursor {
  kt_share *shares;
  int64_t number, share, empty; /* of shares; which is in use; how many are known to be empty */
  int64_t next, count;          /* of the run */
} kt_cursor;

static inline kt_cursor kt_cursor_of(kt_share *shares, int64_t number, int64_t own) {
  return (kt_cursor){.shares = shares, .number = number, .share = own};
}

static inline int kt_cursor_refill(kt_cursor *c) {
  for (; c->empty < c->number; c->empty++) {
    if (kt_share_take(c->shares + c->share, &c->next, &c->count)) return 1;
    c->share = c->share + 1 < c->number ? c->share + 1 : 0;
  }
  return 0;
}

static inline int kt_cursor_take(kt_cursor *c, int64_t *item) {
  if (!c->count && !kt_cursor_refill(c)) return 0;
  *item = c->next++;
  c->count--;
  return 1;
}

/* Whether products of so many tokens are streamed. */
static inline int kt_streams(const kt_forward_run *f, int64_t tokens) {
  return f->stream && tokens >= f->least_tokens;
}

/* Sums of the strip in progress, or of the one before it: of gate (0, 1) and up (2, 3), or of down
 * (0, 1). */
static inline float *kt_stream_sums(const kt_worker *w, int64_t buffer) {
  return w->sums + buffer * KT_STREAM_TOKENS * KT_STRIP;
}

/* What is added to them. */
static inline float *kt_stream_plus(const kt_worker *w, int64_t buffer) {
  return w->plus + buffer * KT_STREAM_TOKENS * KT_STRIP;
}

/* Numbers of the first strip in the place of its sums, `count` tokens. */
static inline void kt_numbers_in_place(const kt_forward_run *f, int64_t count, float *numbers,
                                       kt_sums *sums) {
  if (sums->whole || sums->row_scale) f->epilogue->numbers(sums, 0, count, numbers);
  *sums = kt_sums_of(numbers, count);
}

/* A strip of a matrix, for a thread that comes to it: NULL codes where there is none. */
typedef struct kt_place {
  kt_weight weight;
  int64_t strip, strips;
} kt_place;

/* Beside the next `products` the strips of `next` are fetched. */
void kt_fetch_place(kt_worker *w, const kt_place *next, int64_t products);

static inline const kt_expert *kt_expert_at(const kt_run *r, int64_t part, int64_t active) {
  return r->moe->expert + part * r->moe->experts + r->route.active[active];
}

/* Items of the first step for a group: number, and where the first of a cursor begins. */
int64_t kt_inner_items(const kt_forward_run *f, const kt_team *t, const kt_group *g);
kt_place kt_inner_place(const kt_forward_run *f, const kt_team *t, const kt_group *g, int64_t part,
                        kt_cursor cursor);

/* The middle of a group's slots; `then`: what the thread multiplies with afterwards. */
void kt_inner_step(kt_forward_run *f, kt_team *t, kt_worker *w, kt_group *g, int64_t part,
                   kt_cursor *cursor, const kt_place *then);

/* How many strips of down are fetched together: of short ones several, to go round several pages.
 */
int64_t kt_down_together(const kt_run *r);

/* The same for the second step, which adds to the part's `partial`. A thread owns columns of all
 * experts of a group, so that sums run in a fixed order without atomics or copies. */
int64_t kt_down_items(const kt_forward_run *f);
kt_place kt_down_place(const kt_forward_run *f, const kt_group *g, int64_t part, kt_cursor cursor);
void kt_down_step(kt_forward_run *f, kt_team *t, kt_worker *w, kt_group *g, int64_t part,
                  kt_cursor *cursor, const kt_place *then);

#endif
