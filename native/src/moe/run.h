/* run.h - one call of a layer: what the threads of the pool share while they compute it.
 *
 * Threads form one team per NUMA node (fewer if there are fewer parts); a team computes whole
 * parts. Team t has the nodes n with n * teams / nodes == t, and the parts likewise. Items are
 * shared out dynamically: which thread computes one does not matter for its bits. */
#ifndef KT_RUN_H
#define KT_RUN_H

#include "../pool/pool.h"
#include "../source/decode.h"
#include "epilogue.h"
#include "route.h"

enum { KT_BATCH = 2048 }; /* tokens of one job */

static inline int64_t kt_smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t kt_larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t kt_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A layer, the pool that computes it, and one batch of tokens. */
typedef struct kt_run {
  const kt_moe *moe;
  const kt_weight_format *format;
  kt_pool *pool;
  kt_route route;
  kt_barrier all;              /* all threads */
  int64_t team_count, width;   /* width: columns of the middle, intermediate / parts */
  int64_t tokens, first_token; /* of the batch */
  int64_t top_k;
} kt_run;

/* ---- Memory: laid out by a function that is also run without any, to learn the size ---- */

typedef struct kt_arena {
  uint8_t *base;
  size_t used;
} kt_arena;

/* 64-byte aligned; NULL where there is no memory. */
void *kt_take(kt_arena *arena, int64_t count, size_t size);
void kt_take_route(kt_arena *arena, kt_route *route, int64_t experts, int64_t slots);

/* Memory of one team. Scratch is cut into as many regions of equal size as there are teams, so that
 * a page stays with its team whatever the sizes of calls, and on the node of who first wrote to it.
 * Regions are whole pages, and huge ones where they are larger than one. */
kt_arena kt_team_arena(const kt_run *run, void *scratch, size_t scratch_size, int64_t team);
/* Bytes of scratch where no team takes more than `most`. */
size_t kt_teams_size(const kt_run *run, size_t most);

/* ---- Arguments ---- */

kt_status kt_check_layer(const kt_moe *moe);
kt_status kt_check_batch(const kt_moe *moe, int64_t tokens, int64_t top_k);
int kt_aligned(const void *pointer, size_t size); /* size: a power of two */
size_t kt_value_size(int dtype);                  /* of x and y; 0: none of their dtypes */
/* Arrays that are read: x, ids, weights. */
kt_status kt_check_inputs(const kt_moe_call *call);
/* Experts of the batch that have tokens. */
kt_status kt_check_experts(const kt_run *run);

/* ---- A call, batch by batch ---- */

/* A run of up to `tokens` tokens at a time. */
kt_run kt_run_of(const kt_moe *moe, const kt_pool *pool, int64_t tokens, int64_t top_k);

/* Notes the experts to skip: they are copied, as the caller may change them meanwhile. */
void kt_run_skip(kt_run *run, const kt_moe_call *call);

/* The batch that begins with token `first`: its slots. */
void kt_run_batch(kt_run *run, const kt_moe_call *call, int64_t first);

/* x, to be read as values of bf16. */
kt_matrix kt_run_values(const kt_moe *moe, const void *data, int64_t tokens, int dtype);

/* ---- Teams ---- */

int64_t kt_team_of(const kt_run *run, int32_t thread);
int32_t kt_team_threads(const kt_run *run, int64_t team);
int32_t kt_first_thread(const kt_run *run, int64_t team);
int32_t kt_team_rank(const kt_run *run, int32_t thread); /* position of a thread in its team */
int64_t kt_first_part(const kt_run *run, int64_t team);  /* ... to that of the next team */

/* ---- Matrices of an expert in a part ---- */

static inline kt_weight kt_gate_weight(const kt_run *r, const kt_expert *e) {
  return (kt_weight){e->gate, e->gate_scale, r->width, r->moe->hidden, r->moe->layout};
}
static inline kt_weight kt_up_weight(const kt_run *r, const kt_expert *e) {
  return (kt_weight){e->up, e->up_scale, r->width, r->moe->hidden, r->moe->layout};
}
static inline kt_weight kt_down_weight(const kt_run *r, const kt_expert *e) {
  return (kt_weight){e->down, e->down_scale, r->moe->hidden, r->width, r->moe->layout};
}

/* ---- Slots of an expert in blocks of nearly equal size, at most `most` each ---- */

typedef struct kt_blocks {
  int64_t first, count, number;
} kt_blocks;

static inline kt_blocks kt_blocks_of(int64_t first, int64_t count, int64_t most) {
  return (kt_blocks){first, count, kt_ceil_div(count, most)};
}

/* Of the expert active[a]. */
static inline kt_blocks kt_expert_blocks(const kt_route *route, int64_t a, int64_t most) {
  return kt_blocks_of(route->start[a], route->start[a + 1] - route->start[a], most);
}

static inline int64_t kt_block_start(const kt_blocks *b, int64_t i) {
  return b->first + b->count * i / b->number;
}

/* Strips of one item of work. Few items per thread leave some idle at the end, many make each too
 * short to stream: every jump to another matrix costs 0.3 us of reading from memory (Zen 4).
 * `tokens`: of the largest product call. */
int64_t kt_strips_per_item(int64_t strips, int64_t threads, int64_t tokens);

/* Tokens of the largest block of any expert, at least 1. */
int64_t kt_largest_block(const kt_route *route);

/* Whether each slot's token is the one after that of the slot before. */
int kt_in_a_row(const int32_t *token, int64_t count);

#endif
