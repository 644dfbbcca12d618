/* amx_blocks.h - a strip times rows of activations with AMX, where unpacking takes longer than the
 * products of 32 tokens: the loop of formats that become bf16, for more tokens than that.
 *
 * Columns are cut into blocks of four steps. All tokens are multiplied with a block before the
 * next one, which is unpacked once, into the other slot of the ring, beside the products of the
 * block before. Behind a block sums leave the tiles: to be scaled and added to totals where each
 * block has a scale (amx_groups.h), or to `out`, from where the next block of columns loads them
 * again, which changes no bits. More than eight halves of tokens, whose sums would not stay in L1,
 * are shared out among several rounds over all columns.
 *
 * (Xeon with AMX, one core, 64 tokens, K = 2048, nanoseconds for four products, unpacked for each
 * two halves and once: NVFP4 69 and 39, MXFP4 43 and 33, FP8 with scales of blocks 54 and 41.)
 *
 * Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_AMX_BLOCKS_H
#define KT_AMX_BLOCKS_H

#include "amx_groups.h"

enum {
  KT_AMX_BLOCK = 4,  /* steps */
  KT_AMX_PASSES = 4, /* of a round, each of two halves */
  KT_AMX_PARTS = 4   /* of unpacking a step */
};
_Static_assert(KT_AMX_BLOCK *KT_AMX_TILES <= KT_AMX_SLOT, "a block fits a slot");

/* What is left to unpack of the next block. */
typedef struct kt_amx_unpacking {
  kt_amx_codes codes;
  uint8_t *tiles;
  int part, left; /* of a step; of all */
} kt_amx_unpacking;

KT_INLINE kt_amx_codes kt_amx_codes_at(const kt_amx_group_form form, kt_amx_codes codes,
                                       int64_t step) {
  return (kt_amx_codes){codes.at + step * form.size, codes.scale + step * form.scale_size};
}

KT_INLINE void kt_amx_unpack_part(const kt_amx_group_form form, kt_amx_unpacking *u) {
  form.unpack(u->codes, u->tiles, u->part);
  u->left--;
  if (++u->part < KT_AMX_PARTS) return;
  u->part = 0;
  u->codes = kt_amx_codes_at(form, u->codes, 1);
  u->tiles += KT_AMX_TILES;
}

/* Two parts of each step: as there are two passes at least, that unpacks all of the next block. */
#define KT_AMX_BLOCK_PART(q)                                                                       \
  do {                                                                                             \
    if ((q) % 2 == 0 && unpacking->left) kt_amx_unpack_part(form, unpacking);                      \
    if (form.scales) kt_amx_add(0, 2 * KT_AMX_ROWS / (4 * KT_AMX_BLOCK), stride, &state->waiting); \
  } while (0)
/* What tile i has from the pass before leaves it, and it begins anew, or goes on. */
#define KT_AMX_BLOCK_FIRST(i)                                                                      \
  do {                                                                                             \
    if ((i) < 2 ? left->there : left->both)                                                        \
      KT_AMX_STORE(i, left->to[(i) / 2] + (i) % 2 * KT_AMX_LINE, 2 * KT_AMX_LINE);                 \
    if (form.scales || b == 0)                                                                     \
      KT_AMX_ZERO(i);                                                                              \
    else                                                                                           \
      KT_AMX_LOAD(i, to[(i) / 2] + (i) % 2 * KT_AMX_LINE, 2 * KT_AMX_LINE);                        \
  } while (0)
#define KT_AMX_BLOCK_STEP(n, BEFORE)                                                               \
  do {                                                                                             \
    KT_AMX_STEP(tiles + (n) * KT_AMX_TILES, KT_AMX_TILES / 2, BEFORE, KT_AMX_BLOCK_PART);          \
    x0 += KT_AMX_LINE, x1 += KT_AMX_LINE;                                                          \
  } while (0)

/* Halves `half` and, if `both`, the next, times `steps` steps of block b; their sums are left in
 * tiles. A token of two halves is loaded for both before it is stored for one: the last half, which
 * begins in the one before, is alone or in the same pass. */
KT_INLINE void kt_amx_block_pass(const kt_amx_group_form form, const int both,
                                 const kt_amx_groups *s, const kt_halves *h, int64_t half,
                                 int64_t b, int64_t steps, kt_amx_unpacking *unpacking,
                                 kt_amx_state *state, kt_beside *beside) {
  const int64_t stride = s->stride, start = kt_half_start(h, half);
  const int64_t start1 = kt_half_start(h, half + both);
  const uint8_t *x0 = s->x + start * stride + b * KT_AMX_BLOCK * KT_AMX_LINE;
  const uint8_t *x1 = s->x + start1 * stride + b * KT_AMX_BLOCK * KT_AMX_LINE;
  const uint8_t *const tiles = beside->ring + beside->slot * KT_AMX_SLOT;
  uint8_t *const sums = form.scales ? beside->spare + state->turn * KT_AMX_PAIR
                                    : (uint8_t *)(s->out + start * KT_STRIP);
  uint8_t *const to[2] = {sums, sums + (start1 - start) * KT_STRIP * (int64_t)sizeof(float)};
  kt_amx_left *const left = &state->left;
  KT_AMX_BLOCK_STEP(0, KT_AMX_BLOCK_FIRST);
  if (!both && left->both) { /* whose tiles are not in use here */
    KT_AMX_STORE(2, left->to[1], 2 * KT_AMX_LINE);
    KT_AMX_STORE(3, left->to[1] + KT_AMX_LINE, 2 * KT_AMX_LINE);
  }
  if (steps > 1) KT_AMX_BLOCK_STEP(1, KT_AMX_NOTHING);
  if (steps > 2) KT_AMX_BLOCK_STEP(2, KT_AMX_NOTHING);
  if (steps > 3) KT_AMX_BLOCK_STEP(3, KT_AMX_NOTHING);
  if (form.scales) kt_amx_next_waiting(form, s, h, half, both, b, sums, state);
  left->there = 1, left->both = both;
  left->to[0] = to[0], left->to[1] = to[1];
  state->turn ^= 1;
}

KT_INLINE int kt_amx_block_steps(int64_t steps, int64_t b) {
  const int64_t left = steps - b * KT_AMX_BLOCK;
  return (int)(left < KT_AMX_BLOCK ? left : KT_AMX_BLOCK);
}

/* Passes first .. end - 1 of a round over all columns; behind it, `next_steps` of the codes `next`
 * are unpacked. */
KT_INLINE void kt_amx_block_round(const kt_amx_group_form form, const kt_amx_groups *s,
                                  const kt_halves *h, int64_t first, int64_t end, int64_t steps,
                                  kt_amx_codes next, int next_steps, kt_amx_state *state,
                                  kt_beside *beside) {
  const int64_t blocks = (steps + KT_AMX_BLOCK - 1) / KT_AMX_BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int last = b + 1 == blocks;
    kt_amx_unpacking unpacking = {
        .codes = last ? next : kt_amx_codes_at(form, s->first, (b + 1) * KT_AMX_BLOCK),
        .tiles = beside->ring + (beside->slot ^ 1) * KT_AMX_SLOT,
        .left = KT_AMX_PARTS * (last ? next_steps : kt_amx_block_steps(steps, b + 1))};
    for (int64_t half = 2 * first; half < 2 * end; half += 2)
      if (half + 1 < h->count)
        kt_amx_block_pass(form, 1, s, h, half, b, kt_amx_block_steps(steps, b), &unpacking, state,
                          beside);
      else
        kt_amx_block_pass(form, 0, s, h, half, b, kt_amx_block_steps(steps, b), &unpacking, state,
                          beside);
    while (unpacking.left) kt_amx_unpack_part(form, &unpacking);
    beside->slot ^= 1;
  }
}

/* kt_stream_fn, but for `sums`, of more than two halves; form is a constant. steps: of a strip;
 * form.steps is not looked at. following: the strip that comes next, of following_steps. */
KT_INLINE void kt_amx_stream_blocks(const kt_amx_group_form form, const kt_amx_groups *s,
                                    int64_t steps, kt_amx_codes following, int64_t following_steps,
                                    int64_t tokens, kt_beside *beside) {
  const kt_halves h = kt_halves_of(tokens);
  const int64_t passes = (h.count + 1) / 2, rounds = (passes + KT_AMX_PASSES - 1) / KT_AMX_PASSES;
  const int own_steps = kt_amx_block_steps(steps, 0);
  const int next_steps = kt_amx_block_steps(following_steps, 0);
  kt_amx_state state = {.turn = 0};
  kt_amx_prepare(beside, &h, KT_AMX_LINE);
  kt_beside_start(beside, steps * passes);
  if (form.scales) __builtin_memset(s->out, 0, (size_t)(tokens * KT_STRIP) * sizeof *s->out);
  if (beside->ready != s->first.at || beside->ready_steps < own_steps) {
    kt_amx_unpacking unpacking = {.codes = s->first,
                                  .tiles = beside->ring + beside->slot * KT_AMX_SLOT,
                                  .left = KT_AMX_PARTS * own_steps};
    while (unpacking.left) kt_amx_unpack_part(form, &unpacking);
  }
  for (int64_t r = 0; r < rounds; r++)
    kt_amx_block_round(form, s, &h, passes * r / rounds, passes * (r + 1) / rounds, steps,
                       r + 1 < rounds ? s->first : following,
                       r + 1 < rounds ? own_steps : next_steps, &state, beside);
  kt_amx_store_left(&state.left);
  if (form.scales) {
    kt_amx_add_rest(0, s->stride, &state.waiting);
    kt_amx_add_rest(0, s->stride, &state.left.waiting);
  }
  beside->ready = following.at, beside->ready_steps = next_steps;
}

/* kt_amx_stream of a form whose slots are one step and whose strips one run: by whichever of the
 * two unpacks less. */
KT_INLINE void kt_amx_stream_unpacked(const kt_amx_form form, kt_amx_strip_fn *strip_of,
                                      const kt_weight *w, int64_t strip, const uint8_t *x,
                                      int64_t stride, int64_t tokens, const void *tables,
                                      kt_beside *beside, float *out) {
  const kt_amx_group_form blocks = {
      .size = form.size, .scale_size = form.scale_size, .unpack = form.unpack};
  const kt_amx_strip own = strip_of(w, strip);
  const kt_amx_strip following =
      beside->following ? strip_of(beside->following, beside->following_strip) : own;
  kt_amx_groups s = {.w = w, .first = own.run[0], .x = x, .stride = stride, .out = out};
  kt_amx_codes next = following.run[0];
  if (tables) s.first.scale = next.scale = tables;
  if (tokens > 2 * KT_AMX_ROWS)
    kt_amx_stream_blocks(blocks, &s, own.slots[0], next, following.slots[0], tokens, beside);
  else
    kt_amx_stream(form, strip_of, w, strip, x, stride, tokens, tables, beside, out);
}

#endif
