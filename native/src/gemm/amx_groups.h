/* amx_groups.h - a strip times rows of activations with AMX, where groups of columns have scales of
 * their own: the loop of all such formats.
 *
 * Two halves of tokens go over all groups, as in amx_stream.h: a step is unpacked beside the
 * products of the step before. A group's sums leave the tiles, and are scaled and added to totals
 * in memory while the next groups are multiplied. Within a group tiles add; the float operations on
 * its sums are those of the other levels.
 *
 * What goes round in the loop must leave room in L1 for the activations that pass through, or lines
 * that were just written go to L2 and come back. Unpacking a group once for all tokens and the
 * groups in turn did that: 16 KB of ring, 8 of totals, 8 of sums, and activations of all tokens in
 * short pieces (FP8, 64 tokens, K = 2048, nanoseconds for four products: 60, of which 23 because
 * activations came from L2; those take 5 if the ring has 4 KB).
 *
 * Stores directly behind the products of their tiles do not overlap with products: four of each
 * take 34 ns, and 21 if each tile is stored one product later or more (measured; why is not known).
 * So each tile is stored within the next group, just before it is zeroed there. What is added
 * beside a group are the sums of the group before the last. While products are in progress a core
 * has one port for float operations, not two: three operations for 16 numbers of int8, one for
 * those of bf16, are what groups of 32 columns take longest for.
 *
 * Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_AMX_GROUPS_H
#define KT_AMX_GROUPS_H

#include "amx_stream.h"

enum { KT_AMX_PAIR = 2 * KT_AMX_ROWS * KT_STRIP * 4 /* bytes of the sums of two halves */ };
_Static_assert(2 * KT_AMX_PAIR <= KT_BESIDE_SPARE, "sums of two pairs of halves");

/* Where a strip's groups are, and activations. */
typedef struct kt_amx_groups {
  const kt_weight *w;
  kt_amx_codes first; /* step; others follow */
  const uint8_t *x;
  const uint8_t *x_scale; /* int8: the float of the first token and group; others: NULL */
  int64_t strip, number, stride;
  float *out; /* [tokens][32] totals */
} kt_amx_groups;

/* The scales of group g of 32 rows. */
typedef void kt_amx_scales_fn(const kt_amx_groups *s, int64_t g, __m512 scale[2]);

typedef struct kt_amx_group_form {
  int int8;
  int steps, line, half;    /* of a group; bytes of activations and of a half tile of a step */
  int size, scale_size;     /* bytes of the codes of a step, and of what lies at their scales */
  kt_amx_unpack_fn *unpack; /* a step, in 4 parts */
  kt_amx_scales_fn *scales; /* NULL: there is one sum of all groups (amx_blocks.h) */
} kt_amx_group_form;

/* Sums of `tokens` tokens that wait to be added. All that is needed for it is here: the parts of it
 * are many and short, so nothing is looked up in them, let alone by a call. */
typedef struct kt_amx_waiting {
  const uint8_t *sums, *x_scale;
  float *to;
  int64_t tokens;
  __m512 scale[2];
} kt_amx_waiting;

/* Sums of a pass that are still in tiles, where they are to go, and what is known of them. */
typedef struct kt_amx_left {
  int there, both;
  uint8_t *to[2]; /* of each half */
  kt_amx_waiting waiting;
} kt_amx_left;

/* What one group leaves to the next: sums that are added beside it, and sums in tiles. */
typedef struct kt_amx_state {
  kt_amx_waiting waiting;
  kt_amx_left left;
  int turn; /* whose room for sums is next */
} kt_amx_state;

/* Where scales of activations are, so many bytes on; NULL where there are none. */
KT_INLINE const uint8_t *kt_amx_x_scale(const int int8, const uint8_t *from, int64_t bytes) {
  return int8 ? from + bytes : NULL;
}

/* The sums of one token: those of int8 are scaled for it, too. */
KT_INLINE void kt_amx_add_token(const int int8, const uint8_t *sums, const uint8_t *x_scale,
                                const __m512 scale0, const __m512 scale1, float *to) {
  const __m512 to0 = _mm512_load_ps(to), to1 = _mm512_load_ps(to + 16);
  if (int8) {
    float one;
    __builtin_memcpy(&one, x_scale, sizeof one);
    const __m512 both = _mm512_set1_ps(one);
    const __m512 sum0 = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
    const __m512 sum1 = _mm512_cvtepi32_ps(_mm512_load_si512(sums + KT_AMX_LINE));
    _mm512_store_ps(to, _mm512_fmadd_ps(sum0, _mm512_mul_ps(scale0, both), to0));
    _mm512_store_ps(to + 16, _mm512_fmadd_ps(sum1, _mm512_mul_ps(scale1, both), to1));
  } else {
    _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(sums), scale0, to0));
    _mm512_store_ps(to + 16, _mm512_fmadd_ps(_mm512_load_ps(sums + KT_AMX_LINE), scale1, to1));
  }
}

#if defined(__SANITIZE_ADDRESS__) /* unoptimized copies of it would fill the stack of a thread */
#define KT_AMX_ADDING static __attribute__((noinline, unused))
#else
#define KT_AMX_ADDING KT_INLINE
#endif

/* Of up to `most` tokens, a constant. */
KT_AMX_ADDING void kt_amx_add(const int int8, const int most, int64_t stride,
                              kt_amx_waiting *waiting) {
  const int64_t left = waiting->tokens, some = left < most ? left : most;
  const uint8_t *sums = waiting->sums, *x_scale = waiting->x_scale;
  const __m512 scale0 = waiting->scale[0], scale1 = waiting->scale[1];
  float *to = waiting->to;
  if (some == most) {
    KT_UNROLL(8)
    for (int t = 0; t < most; t++)
      kt_amx_add_token(int8, sums + t * KT_STRIP * 4, kt_amx_x_scale(int8, x_scale, t * stride),
                       scale0, scale1, to + t * KT_STRIP);
  } else {
    for (int64_t t = 0; t < some; t++)
      kt_amx_add_token(int8, sums + t * KT_STRIP * 4, kt_amx_x_scale(int8, x_scale, t * stride),
                       scale0, scale1, to + t * KT_STRIP);
  }
  waiting->tokens = left - some;
  waiting->sums = sums + some * KT_STRIP * 4;
  waiting->x_scale = kt_amx_x_scale(int8, x_scale, some * stride);
  waiting->to = to + some * KT_STRIP;
}

/* Of all that are left. */
KT_INLINE void kt_amx_add_rest(const int int8, int64_t stride, kt_amx_waiting *waiting) {
  for (; waiting->tokens > 0; kt_amx_add(int8, 1, stride, waiting)) {
  }
}

/* Behind each product: a part of the next step, and of the sums that wait. */
#define KT_AMX_GROUP_PART(q)                                                                       \
  do {                                                                                             \
    form.unpack(next, room, q);                                                                    \
    kt_amx_add(form.int8, (2 * KT_AMX_ROWS) / (4 * form.steps), stride, &state->waiting);          \
  } while (0)
/* What tile i has from the group before leaves it, and it begins anew. */
#define KT_AMX_GROUP_FIRST(i)                                                                      \
  do {                                                                                             \
    if ((i) < 2 ? left->there : left->both)                                                        \
      KT_AMX_STORE(i, left->to[(i) / 2] + (i) % 2 * KT_AMX_LINE, 2 * KT_AMX_LINE);                 \
    KT_AMX_ZERO(i);                                                                                \
  } while (0)
/* Step n of a group; `behind` is what is unpacked at the end of the group's codes. */
#define KT_AMX_GROUP_STEP(n, BEFORE)                                                               \
  do {                                                                                             \
    const kt_amx_codes next = {(n) + 1 < form.steps ? at + form.size : behind, s->first.scale};    \
    const uint8_t *const tiles = beside->ring + slot * KT_AMX_SLOT;                                \
    uint8_t *const room = beside->ring + (slot ^ 1) * KT_AMX_SLOT;                                 \
    KT_AMX_STEP(tiles, form.half, BEFORE, KT_AMX_GROUP_PART);                                      \
    x0 += form.line, x1 += form.line;                                                              \
    at = next.at;                                                                                  \
    slot ^= 1;                                                                                     \
  } while (0)

KT_INLINE void kt_amx_store_left(const kt_amx_left *left) {
  enum { LINE = 2 * KT_AMX_LINE }; /* 32 rows */
  if (left->there) KT_AMX_STORE(0, left->to[0], LINE);
  if (left->there) KT_AMX_STORE(1, left->to[0] + KT_AMX_LINE, LINE);
  if (left->both) KT_AMX_STORE(2, left->to[1], LINE);
  if (left->both) KT_AMX_STORE(3, left->to[1] + KT_AMX_LINE, LINE);
}

/* What waits is done; the sums of the pass before wait now, and then those of this one, which are
 * going to `sums`. */
KT_INLINE void kt_amx_next_waiting(const kt_amx_group_form form, const kt_amx_groups *s,
                                   const kt_halves *h, int64_t half, const int both, int64_t g,
                                   const uint8_t *sums, kt_amx_state *state) {
  const int64_t start = kt_half_start(h, half), first = kt_half_new(h, half);
  kt_amx_waiting *const mine = &state->left.waiting;
  kt_amx_add_rest(form.int8, s->stride, &state->waiting);
  state->waiting = *mine;
  mine->sums = sums + (first - start) * KT_STRIP * 4;
  mine->x_scale =
      kt_amx_x_scale(form.int8, s->x_scale, first * s->stride + g * (int64_t)sizeof(float));
  mine->to = s->out + first * KT_STRIP;
  mine->tokens = kt_half_start(h, half + both) + h->rows - first;
  form.scales(s, g, mine->scale);
}

/* Halves `half` and, if `both`, the next, times all groups; the sums of the last are left in tiles.
 * following: what is unpacked behind the last step. */
KT_INLINE void kt_amx_group_pass(const kt_amx_group_form form, const int both,
                                 const kt_amx_groups *s, const kt_halves *h, int64_t half,
                                 const uint8_t *following, kt_amx_state *state, kt_beside *beside) {
  const int64_t stride = s->stride, start = kt_half_start(h, half);
  const int64_t start1 = kt_half_start(h, half + both);
  const uint8_t *x0 = s->x + start * stride, *x1 = s->x + start1 * stride, *at = s->first.at;
  kt_amx_left *const left = &state->left;
  int slot = beside->slot;
  for (int64_t g = 0; g < s->number; g++) {
    const uint8_t *const behind = g + 1 < s->number ? at + form.steps * form.size : following;
    uint8_t *const to = beside->spare + state->turn * KT_AMX_PAIR;
    KT_AMX_GROUP_STEP(0, KT_AMX_GROUP_FIRST);
    if (!both && left->both) { /* whose tiles are not in use here */
      KT_AMX_STORE(2, left->to[1], 2 * KT_AMX_LINE);
      KT_AMX_STORE(3, left->to[1] + KT_AMX_LINE, 2 * KT_AMX_LINE);
    }
    if (form.steps > 1) KT_AMX_GROUP_STEP(1, KT_AMX_NOTHING);
    if (form.steps > 2) KT_AMX_GROUP_STEP(2, KT_AMX_NOTHING);
    if (form.steps > 3) KT_AMX_GROUP_STEP(3, KT_AMX_NOTHING);
    kt_amx_next_waiting(form, s, h, half, both, g, to, state);
    left->there = 1, left->both = both;
    left->to[0] = to, left->to[1] = to + (start1 - start) * KT_STRIP * 4;
    state->turn ^= 1;
  }
  beside->slot = slot;
}

/* The codes of the strip that comes next, of this format; strip_size: bytes of one of this matrix.
 */
KT_INLINE const uint8_t *kt_amx_following(const kt_amx_groups *s, int64_t strip_size,
                                          const kt_beside *beside) {
  const kt_weight *const w = beside->following;
  return w ? w->codes + beside->following_strip * (strip_size / s->w->cols) * w->cols : s->first.at;
}

/* kt_stream_fn, but for `sums`; form is a constant. strip_size: bytes of the codes of a strip. */
KT_INLINE void kt_amx_stream_groups(const kt_amx_group_form form, const kt_amx_groups *s,
                                    int64_t strip_size, int64_t tokens, kt_beside *beside) {
  const uint8_t *const following = kt_amx_following(s, strip_size, beside);
  const kt_halves h = kt_halves_of(tokens);
  const int64_t passes = (h.count + 1) / 2;
  kt_amx_state state = {.turn = 0};
  kt_amx_prepare(beside, &h, form.line);
  kt_beside_start(beside, s->number * form.steps * passes);
  __builtin_memset(s->out, 0, (size_t)(tokens * KT_STRIP) * sizeof *s->out);
  if (beside->ready != s->first.at) {
    uint8_t *const tiles = beside->ring + beside->slot * KT_AMX_SLOT;
    KT_UNROLL(4)
    for (int part = 0; part < 4; part++) form.unpack(s->first, tiles, part);
  }
  for (int64_t half = 0; half < h.count; half += 2) {
    const uint8_t *const next = half + 2 < h.count ? s->first.at : following;
    if (half + 1 < h.count)
      kt_amx_group_pass(form, 1, s, &h, half, next, &state, beside);
    else
      kt_amx_group_pass(form, 0, s, &h, half, next, &state, beside);
  }
  kt_amx_store_left(&state.left);
  kt_amx_add_rest(form.int8, s->stride, &state.waiting);
  kt_amx_add_rest(form.int8, s->stride, &state.left.waiting);
  beside->ready = following, beside->ready_steps = 1;
}

#endif
