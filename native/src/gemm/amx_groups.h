/* amx_groups.h - a strip times rows of activations with AMX, where groups of columns have scales of
 * their own: the loop of all such formats.
 *
 * A group's sums leave the tiles, and are scaled and added to totals in memory while the next are
 * multiplied. As they leave anyway, all tokens are multiplied with a group before the next one: it
 * is unpacked once, into the ring of amx_stream.h, beside the products of the group before. Within
 * a group tiles add; the float operations on its sums are those of the other levels.
 *
 * Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_AMX_GROUPS_H
#define KT_AMX_GROUPS_H

#include "amx_stream.h"

enum { KT_AMX_PAIR = 2 * KT_AMX_ROWS * KT_STRIP * 4 /* bytes of the sums of two halves */ };
_Static_assert(2 * KT_AMX_PAIR <= KT_BESIDE_SPARE, "sums of two pairs of halves");

/* Where a strip's groups are, and activations; what an `add` may want to know. */
typedef struct kt_amx_groups {
  const kt_weight *w;
  const uint8_t *codes; /* of the first group; others follow */
  const void *tables;   /* for unpacking, or NULL */
  const uint8_t *x;
  int64_t strip, number, stride;
  float *out; /* [tokens][32] totals */
} kt_amx_groups;

/* out[t] += sums of group g of tokens first .. end, scaled; sums: those of token `first`. */
typedef void kt_amx_add_fn(const kt_amx_groups *s, int64_t g, int64_t first, int64_t end,
                           const void *sums);

typedef struct kt_amx_group_form {
  int int8;
  int steps, line, half;    /* of a group; bytes of activations and of a half tile of a step */
  int size;                 /* bytes of the codes of a group */
  kt_amx_unpack_fn *unpack; /* in 4 * steps parts */
  kt_amx_add_fn *add;
} kt_amx_group_form;

/* Sums that wait to be added: of tokens next .. end, the first of them at `sums`. */
typedef struct kt_amx_waiting {
  const uint8_t *sums;
  int64_t group, next, end;
} kt_amx_waiting;

/* Which parts of the next group a pass unpacks. */
enum { KT_AMX_NONE, KT_AMX_ALL, KT_AMX_FIRST_HALF, KT_AMX_SECOND_HALF };

KT_INLINE void kt_amx_add(const kt_amx_group_form form, const kt_amx_groups *s,
                          kt_amx_waiting *waiting, int64_t tokens) {
  const int64_t left = waiting->end - waiting->next, some = tokens < left ? tokens : left;
  if (some <= 0) return;
  form.add(s, waiting->group, waiting->next, waiting->next + some, waiting->sums);
  waiting->next += some;
  waiting->sums += some * KT_STRIP * 4;
}

/* What comes behind product q of 4 * steps of a pass. */
#define KT_AMX_GROUP_PART(q)                                                                       \
  do {                                                                                             \
    if (unpacking == KT_AMX_ALL) form.unpack(next, room, q);                                       \
    if (unpacking == KT_AMX_FIRST_HALF && (q) % 2 == 0) form.unpack(next, room, (q) / 2);          \
    if (unpacking == KT_AMX_SECOND_HALF && (q) % 2 == 0)                                           \
      form.unpack(next, room, 2 * form.steps + (q) / 2);                                           \
    kt_amx_add(form, s, waiting, (2 * KT_AMX_ROWS) / (4 * form.steps));                            \
  } while (0)
#define KT_AMX_GROUP_PART0(n) KT_AMX_GROUP_PART(n)
#define KT_AMX_GROUP_PART1(n) KT_AMX_GROUP_PART(4 + (n))
#define KT_AMX_GROUP_PART2(n) KT_AMX_GROUP_PART(8 + (n))
#define KT_AMX_GROUP_PART3(n) KT_AMX_GROUP_PART(12 + (n))
#define KT_AMX_GROUP_STEP(n)                                                                       \
  do {                                                                                             \
    KT_AMX_STEP(tiles + (n) * 2 * form.half, form.half, KT_AMX_GROUP_PART##n);                     \
    x0 += form.line, x1 += form.line;                                                              \
  } while (0)

/* Halves `half` and, if `both`, the next, times group g; their sums wait then. */
KT_INLINE void kt_amx_group_pass(const kt_amx_group_form form, const int both, const int unpacking,
                                 const kt_amx_groups *s, const kt_halves *h, int64_t half,
                                 int64_t g, kt_amx_codes next, kt_amx_waiting *waiting, int turn,
                                 kt_beside *beside) {
  const int64_t stride = s->stride, start = kt_half_start(h, half);
  const int64_t start1 = kt_half_start(h, half + both);
  const uint8_t *x0 = s->x + start * stride + g * form.steps * form.line;
  const uint8_t *x1 = s->x + start1 * stride + g * form.steps * form.line;
  const uint8_t *const tiles = beside->ring + beside->slot * KT_AMX_SLOT;
  uint8_t *const room = beside->ring + (beside->slot ^ 1) * KT_AMX_SLOT;
  uint8_t *const to = beside->spare + turn * KT_AMX_PAIR;
  void *const sums[2] = {to, to + (start1 - start) * KT_STRIP * 4};
  kt_amx_zero_sums(both);
  KT_AMX_GROUP_STEP(0);
  if (form.steps > 1) KT_AMX_GROUP_STEP(1);
  if (form.steps > 2) KT_AMX_GROUP_STEP(2);
  if (form.steps > 3) KT_AMX_GROUP_STEP(3);
  kt_amx_add(form, s, waiting, waiting->end - waiting->next);
  kt_amx_store_sums(both, sums);
  const int64_t first = kt_half_new(h, half);
  *waiting = (kt_amx_waiting){to + (first - start) * KT_STRIP * 4, g, first, start1 + h->rows};
}

KT_INLINE void kt_amx_group_unpack(const kt_amx_group_form form, const int unpacking,
                                   const kt_amx_groups *s, const kt_halves *h, int64_t half,
                                   int64_t g, kt_amx_codes next, kt_amx_waiting *waiting, int turn,
                                   kt_beside *beside) {
  if (half + 1 < h->count)
    kt_amx_group_pass(form, 1, unpacking, s, h, half, g, next, waiting, turn, beside);
  else
    kt_amx_group_pass(form, 0, unpacking, s, h, half, g, next, waiting, turn, beside);
}

/* kt_stream_fn, but for `sums`; form is a constant. strip_size: bytes of the codes of a strip. */
KT_INLINE void kt_amx_stream_groups(const kt_amx_group_form form, const kt_amx_groups *s,
                                    int64_t strip_size, int64_t tokens, kt_beside *beside) {
  const uint8_t *const following = beside->following
                                       ? beside->following->codes + beside->following_strip *
                                                                        (strip_size / s->w->cols) *
                                                                        beside->following->cols
                                       : s->codes;
  const kt_halves h = kt_halves_of(tokens);
  const int64_t passes = (h.count + 1) / 2;
  kt_amx_waiting waiting = {.sums = beside->spare};
  int turn = 0;
  kt_amx_prepare(beside, &h, form.line);
  kt_beside_start(beside, s->number * form.steps * passes);
  __builtin_memset(s->out, 0, (size_t)(tokens * KT_STRIP) * sizeof *s->out);
  if (beside->ready != s->codes) {
    uint8_t *const tiles = beside->ring + beside->slot * KT_AMX_SLOT;
    KT_UNROLL(16)
    for (int part = 0; part < 4 * form.steps; part++)
      form.unpack((kt_amx_codes){s->codes, s->tables}, tiles, part);
  }
  for (int64_t g = 0; g < s->number; g++) {
    const int last = g + 1 == s->number;
    const kt_amx_codes next = {last ? following : s->codes + (g + 1) * form.size, s->tables};
    for (int64_t half = 0; half < h.count; half += 2, turn ^= 1) {
      if (half == 0 && passes == 1)
        kt_amx_group_unpack(form, KT_AMX_ALL, s, &h, half, g, next, &waiting, turn, beside);
      else if (half == 0)
        kt_amx_group_unpack(form, KT_AMX_FIRST_HALF, s, &h, half, g, next, &waiting, turn, beside);
      else if (half == 2)
        kt_amx_group_unpack(form, KT_AMX_SECOND_HALF, s, &h, half, g, next, &waiting, turn, beside);
      else
        kt_amx_group_unpack(form, KT_AMX_NONE, s, &h, half, g, next, &waiting, turn, beside);
    }
    beside->slot ^= 1;
  }
  kt_amx_add(form, s, &waiting, waiting.end - waiting.next);
  beside->ready = following;
}

#endif
