/* backward.h - the backward of a layer: what its files share.
 *
 * One job of the pool per batch. All threads, between barriers of all:
 *   1  rows of x and dy in bf16; zeros in what is wanted   items: tokens; experts
 *   2  B^T dy of down                                      items: experts
 * then in a team, for each of its parts and one group of blocks after the other, so that rows of
 * one step are still in the caches for the next ones; between its barriers, of which blocks that
 * a thread has for itself need none from 3 to 5:
 *   3  rows of dy as products want them                    items: slots
 *   4  W^T dy of down -> gradients of gate and up          items: (block, strip of w)
 *   5  B^T of those; LoRA gradients of the part; codes     items: blocks; blocks of matrices;
 *      of those, where integers are multiplied                    slots
 *   6  W^T of those, summed over experts -> partial dx;    items: strips of hidden; slots
 *      3 of the next group
 * and all threads again:
 *   7  dx = sum of the parts; gradients of weights and of the LoRA matrices that no part owns
 *   8  gradients in bf16 whose sums were not complete in one step (kt_back_round)
 * Transposed products make a strip of columns at a time from packed weights (strips.h), in memory
 * of the thread; with AMX, strips are decoded while they are multiplied (transposed.h). The routing
 * weight is applied behind step 4, so that W^T dy of down gives the gradient of that weight, too.
 */
/* What is in memory on the way from dy to dx (H: hidden, w: columns of a part, r: rank; W^T and the
 * like: products with that matrix; names are the fields below, `saved` is of the forward; dy, d_*,
 * folded_*, split, middle and pairs have the slots of one group at a time):
 *
 *    dy_rows [token][H]
 *       |          |
 * dy [slot][H]   B^T of down (kt_back_down_products)
 *       |          |
 *     W^T of     v_down, down_rows [slot][r] ------> gradient of down_a
 *      down        |
 *       |        A^T of down: `small` is its strip
 *       |          |
 *     base ----- added    [slot][32 columns of w] -- dot ------> dweights (kt_back_slot_weight)
 *            |
 *          activate, times the routing weight (kt_back_middle)  <------ saved: gate, up, codes of h
 *            |
 *     d_gate, d_up, middle [slot][w] ---------------> gradients of gate_b, up_b, gate, up
 *       |          |
 *     folded_*   B^T of gate and up (kt_back_pairs)
 *     or split     |
 *       |        v_pair, pairs [slot][r of gate, r of up] ------> gradients of gate_a, up_a
 *     W^T of       |
 *    gate, up    A^T of both: `small` again
 *       |          |
 *     base ------- + -----> partial [part][token][H] ------> sum of the parts: dx
 *                  (kt_back_inputs)
 *
 * folded_gate, folded_up: d_gate and d_up times scales of rows; split: the same as codes; dy has
 * scales of down's rows likewise (kt_folding). A gradient of a matrix is the sum over slots of the
 * outer products of two rows, times factors (kt_back_outer):
 *
 *    gate_a, up_a   v_pair, x_rows           gate_b, up_b   d_gate or d_up, A x of `saved`
 *    down_a         v_down, middle           down_b         dy_rows, A h of `saved`
 *    gate, up       d_gate or d_up, x_rows   down           dy_rows, middle */
#ifndef KT_BACKWARD_H
#define KT_BACKWARD_H

#include "rows_view.h"
#include "saved.h"

/* How scales of the weights come into transposed products. */
typedef enum kt_folding {
  KT_FOLD_NONE,   /* strips have them */
  KT_FOLD_ROWS,   /* one per row: folded into activation rows once */
  KT_FOLD_SPLIT,  /* the same, and rows become codes */
  KT_FOLD_GROUPS, /* one per row and group of columns: folded for each strip */
} kt_folding;

/* Slots that are multiplied together, at most KT_CHUNK: of the expert active[active]. */
typedef struct kt_back_block {
  int64_t active, slot, count;
} kt_back_block;

/* Blocks first .. end - 1, and what the threads of a team share of them for one part. Rows of slots
 * are counted from `slot` on in the team's memory. */
typedef struct kt_back_group {
  int64_t first, end, slot;
  int whole; /* a thread does steps 3 to 5 of a block, whose rows stay in its caches */
  kt_share blocks, rows, middle, pairs, outer, split, dx;
} kt_back_group;

typedef struct kt_back_part {
  kt_back_group *groups;
  float *partial; /* [tokens, hidden] of dx */
} kt_back_part;

/* Rows of a group's slots: those of gate, up and h side by side. */
typedef struct kt_back_team {
  kt_barrier barrier;
  uint8_t *dy;                      /* rows of dy as products want them, kt_folded_stride apart */
  uint8_t *d_gate, *d_up;           /* bf16 [w]; d_up alone where there is no gate */
  uint8_t *folded_gate, *folded_up; /* the same with scales of rows; else the same memory */
  uint8_t *middle;                  /* bf16 [w] of h, where a gradient needs it */
  uint8_t *split;                   /* split rows [gate | up] in the memory of folded ones */
  uint16_t *pairs;                  /* rows [gate | up] of B^T d, times factor */
} kt_back_team;

typedef struct kt_back_worker {
  kt_lora_worker lora;               /* gather, strips, spare, out */
  uint8_t *small;                    /* a strip of a LoRA matrix */
  uint8_t *folded_gate, *folded_up;  /* [KT_CHUNK] rows with the scales of a group */
  float *base;                       /* [KT_BACK_SUMS] strips of KT_BACK_STRIP */
  float *added;                      /* [KT_MAX_TOKENS][KT_STRIP] */
  float *fold, *fold_gate, *fold_up; /* [longest row]; fold: of two */
  float *a;                          /* [KT_CHUNK][KT_OUTER_ROWS] */
  float *values;                     /* [hidden] */
  float *ones;                       /* [KT_CHUNK] */
  uint8_t *outer;                    /* KT_OUTER_SCRATCH */
  float *exact;                      /* [KT_OUTER_ROWS * KT_OUTER_COLS] of a gradient in bf16 */
  uint8_t *panel, *ring;             /* of transposed products, with what follows */
  void *sums;
  kt_packed_square *squares;
} kt_back_worker;

enum {
  KT_OUTER_ROWS = 64,
  KT_OUTER_COLS = 256,
  KT_BACK_STRIP = KT_TRANSPOSED_ROWS * KT_STRIP,
  KT_BACK_SUMS = 16 /* strips whose products are sums of several */
};

typedef struct kt_back {
  kt_run run;
  kt_adapter adapter;
  kt_saved saved;
  kt_moe_gradients want;
  const kt_epilogue *epilogue;
  kt_transpose_fn *transpose;
  kt_transposed_fn *transposed; /* NULL: by strips */
  kt_outer_fn *outer_product;
  kt_activate_back_fn *activate;
  kt_folding folding;
  kt_matrix x, dy;
  int64_t h_stride, w_stride;  /* bytes of bf16 rows */
  int64_t slots, partial_size; /* of the largest batch */
  int64_t group_slots;         /* of any group, at most */
  kt_back_block *blocks;
  int32_t *first_block; /* [active + 1] of an expert; the last: behind all */
  int64_t groups;
  uint8_t *x_rows, *dy_rows; /* [tokens] bf16; x_rows: if a gradient needs them */
  float *v_down;             /* [slots][rank] B^T dy */
  uint16_t *down_rows;       /* [slots] the same in bf16, times factor */
  float *v_pair;             /* [parts][slots][2 rank] B^T d of gate and up */
  float *dot;                /* [parts][strips of w][slots] */
  int one_batch;             /* the call has no other */
  int64_t call_tokens;
  float *exact; /* wanted gradients of LoRA matrices one after the other, where they become bf16 */
  kt_share zeros, rows, down, finish, slot_weights, last, round;
  kt_back_team *teams;
  const float **partials; /* of each part */
  kt_back_part *parts;
  kt_back_worker *workers;
} kt_back;

static inline int64_t kt_back_first_slot(const kt_back *b) {
  return b->run.first_token * b->run.top_k;
}

/* Bytes from one such row to the next. */
static inline int64_t kt_folded_stride(int64_t cols) { return 2 * cols + 64; }

/* An expert of a part. */
static inline const kt_expert *kt_back_expert(const kt_back *b, int64_t part, int64_t expert) {
  return b->run.moe->expert + part * b->run.moe->experts + expert;
}

/* Rows of slots that lie one after the other, or (index) where their tokens are. */
kt_rows_view kt_back_view(const kt_back *b, const uint8_t *rows, int64_t stride, int64_t cols,
                          const int32_t *index);

/* Steps: an item, or items first .. first + count - 1, of shares as the numbers above say. */
void kt_back_down_products(const kt_back *b, const kt_back_worker *w, int64_t active); /* 2 */
void kt_back_rows(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                  const kt_back_group *g, int64_t part, int64_t first, int64_t count); /* 3 */
void kt_back_middle(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                    const kt_back_group *g, int64_t part, int64_t first, int64_t count); /* 4 */
void kt_back_pairs(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                   const kt_back_group *g, int64_t part, int64_t item); /* 5 */
void kt_back_split(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                   const kt_back_group *g, int64_t part, int64_t first, int64_t count);
void kt_back_inputs(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                    const kt_back_group *g, int64_t part, int64_t first, int64_t count); /* 6 */
void kt_back_slot_weight(const kt_back *b, int64_t slot, int64_t expert);                /* 7 */

/* Gradients of matrices: those of a part for the slots of a group (5), or (NULL) those that are
 * sums over parts, for all slots (7). */
int64_t kt_back_outer_items(const kt_back *b, const kt_back_group *g);
void kt_back_outer(const kt_back *b, const kt_back_team *t, const kt_back_worker *w,
                   const kt_back_group *g, int64_t part, int64_t item);
void kt_back_zero(const kt_back *b, int64_t expert);
int64_t kt_back_exact_size(const kt_back *b);         /* numbers of b->exact */
void kt_back_round(const kt_back *b, int64_t expert); /* 8 */
int kt_back_needs_x(const kt_back *b);
int kt_back_needs_middle(const kt_back *b);

#endif
