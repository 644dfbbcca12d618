/* served.h - what adapters at inference add to the steps of the forward.
 *
 * The slots of an expert (moe/route.h) stay in the order of their tokens, so the packed weights do
 * not notice adapters. A segment lists those of its slots that have the same adapter, and what A
 * makes of these lies side by side, for tiles. */
#ifndef KT_SERVED_H
#define KT_SERVED_H

#include "../moe/run.h"
#include "../train/adapter.h"
#include "slabs.h"

/* Slots order[first] .. order[first + count - 1], ascending, of one expert. */
typedef struct kt_segment {
  int32_t expert, adapter, first, count;
} kt_segment;

/* Rows of scale * A x or scale * A h, rounded to bf16, in the order of the segments: as floats, and
 * where there are products of tiles also as bf16, with zeros up to whole columns of these. */
typedef struct kt_served_rows {
  float *values;    /* [slots][kt_served.rank for each projection] */
  uint16_t *halves; /* [slots + KT_SLAB_ROWS][kt_served.cols for each projection] */
  uint8_t *middle;  /* of down: [slots] bf16 rows of the middle, in the order of slots */
} kt_served_rows;

/* Of a call; nothing of it is touched where `adapters` is NULL. */
typedef struct kt_served {
  const kt_adapters *adapters;
  const kt_slab_math *math;
  int64_t rank, cols; /* of rows: whole slabs, whole tiles */
  float *x;           /* [tokens][hidden], rounded to bf16, for segments of few slots */
  uint8_t *x_rows;    /* the same as bf16 rows, `x_stride` bytes apart, for the others */
  int64_t x_stride;
  int few, many;        /* whether there are such segments in the batch */
  kt_served_rows inner; /* of gate and of up */
  int32_t *order;
  kt_segment *segments; /* of the expert active[a]: start[a] .. start[a + 1] - 1 */
  int32_t *start;
  int32_t *count; /* [adapters] working memory */
  kt_share products;
} kt_served;

/* KT_OK, or KT_ERR_ARGUMENT for what is wrong with all adapters together. */
kt_status kt_check_adapters(const kt_adapters *adapters);
kt_served kt_served_of(const kt_adapters *adapters);

void kt_take_served(kt_arena *arena, const kt_run *run, int64_t slots, kt_served *served);

/* A team's rows of down, of middles of so many columns. rows may be NULL. */
void kt_take_served_team(kt_arena *arena, const kt_served *served, int64_t slots, int64_t width,
                         kt_served_rows *rows);

/* The segments of the batch. KT_ERR_ARGUMENT: an adapter that does not exist, or a pair that
 * cannot be. */
kt_status kt_served_batch(const kt_run *run, kt_served *served);

/* Whether any slot of the expert active[active] has an adapter. */
static inline int kt_is_served(const kt_served *s, int64_t active) {
  return s->adapters && s->start[active] < s->start[active + 1];
}

/* Before the job of a batch. */
void kt_served_start(const kt_run *run, kt_served *served);

/* Keeps a row of x, rounded to bf16. */
void kt_served_row(const kt_run *run, const kt_served *served, int64_t token, const float *values);

/* All threads, when all rows of x are there: scale * A x. Between barriers of all threads. */
void kt_served_inputs(kt_run *run, kt_served *served, int32_t thread);

/* Some of an expert's slots, and strips of a matrix, `row` being their first row in all parts
 * together. */
typedef struct kt_served_item {
  int64_t active, slot, count, row, strips;
  kt_projection projection;
} kt_served_item;

/* plus [strips][count][32] = B times rows of A x (gate, up), or of A h (down), of which the first
 * is that of slot `before`; where a slot has none -0, which changes no number that it is added to.
 * beside: of the stream that these products are of, or NULL. */
void kt_served_products(const kt_run *run, const kt_served *served, const kt_served_item *item,
                        const kt_served_rows *rows, int64_t before, kt_beside *beside, float *plus);

/* rows = scale * A h of slots slot .. slot + count - 1 in a part; middle [..][width] and rows begin
 * with slot `before`. Rounds the middle to bf16, and has tiles of its own. */
void kt_served_middle(const kt_run *run, const kt_served *served, int64_t part, int64_t active,
                      int64_t slot, int64_t count, int64_t before, float *middle,
                      const kt_served_rows *rows);

#endif
