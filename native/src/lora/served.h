/* served.h - what adapters at inference add to the steps of the forward.
 *
 * The slots of an expert (moe/route.h) stay in the order of their tokens, so the packed weights do
 * not notice adapters. A segment lists those of its slots that have the same adapter. */
#ifndef KT_SERVED_H
#define KT_SERVED_H

#include "../moe/run.h"
#include "../train/adapter.h"
#include "slabs.h"

/* Slots order[first] .. order[first + count - 1], ascending, of one expert. */
typedef struct kt_segment {
  int32_t expert, adapter, first, count;
} kt_segment;

/* Of a call; nothing of it is touched where `adapters` is NULL. */
typedef struct kt_served {
  const kt_adapters *adapters;
  kt_slabs_fn *add;
  int64_t rank; /* columns of a row for each projection: whole slabs */
  float *x;     /* [tokens][hidden], rounded to bf16 */
  float *inner; /* [slots][2 rank] scale * A x of gate and of up */
  int32_t *order;
  kt_segment *segments; /* of the expert active[a]: start[a] .. start[a + 1] - 1 */
  int32_t *start;
  int32_t *count; /* [adapters] working memory */
  kt_share rows, products;
} kt_served;

/* KT_OK, or KT_ERR_ARGUMENT for what is wrong with all adapters together. */
kt_status kt_check_adapters(const kt_adapters *adapters);
kt_served kt_served_of(const kt_adapters *adapters);

/* Floats of a slot's row of scale * A h in a team's memory. */
static inline int64_t kt_served_down_size(const kt_served *s) { return s->adapters ? s->rank : 0; }

void kt_take_served(kt_arena *arena, const kt_run *run, int64_t slots, kt_served *served);

/* The segments of the batch. KT_ERR_ARGUMENT: an adapter that does not exist, or a pair that
 * cannot be. */
kt_status kt_served_batch(const kt_run *run, kt_served *served);

/* Whether any slot of the expert active[active] has an adapter. */
static inline int kt_is_served(const kt_served *s, int64_t active) {
  return s->adapters && s->start[active] < s->start[active + 1];
}

/* Before the job of a batch. */
void kt_served_start(const kt_run *run, kt_served *served);

/* All threads: scale * A x. Ends with a barrier of all threads. */
void kt_served_inputs(kt_run *run, kt_served *served, int32_t thread, const kt_matrix *x);

/* Some of an expert's slots, and strips of the matrix whose products lie in `out`, [strips][count][
 * 32], `row` being their first row in all parts together. */
typedef struct kt_served_item {
  int64_t active, slot, count, row, strips;
  kt_projection projection;
} kt_served_item;

/* Adds B times rows of A x (gate, up), or of A h (down), of which the first is that of slot
 * `before`. */
void kt_served_add(const kt_run *run, const kt_served *served, const kt_served_item *item,
                   const float *rows, int64_t before, float *out);

/* rows = scale * A h of slots slot .. slot + count - 1 in a part; middle [..][width] and rows begin
 * with slot `before`. */
void kt_served_middle(const kt_run *run, const kt_served *served, int64_t part, int64_t active,
                      int64_t slot, int64_t count, int64_t before, const float *middle,
                      float *rows);

#endif
