/* amx_stream.h - a strip of 32 rows times rows of activations with AMX: the loop of all formats.
 *
 * 32 tokens x 32 rows are summed in four tiles over all columns (amx_tiles.h); strip by strip, for
 * all tokens of an expert two halves at a time. A step is 64 bytes of activations: four products of
 * tiles. A format brings how its codes become tiles: as they are (INT8, BF16), or unpacked into a
 * ring of two slots in L1, of which one is multiplied while the next is unpacked, a few lines after
 * each product. Further halves unpack again, from L2: a panel in L2 costs more. (Xeon with AMX, one
 * core, INT4, K = 2048, nanoseconds a step: a ring 36, writing a panel 85 for the first 32 tokens;
 * lines spread over the products 42, behind all of them 50, before prefetching.)
 *
 * Each step fetches and computes what else there is to do (beside.h). Every few steps a spare tile
 * is stored where nobody looks: a core switches off what stores tiles after 600 ns without, and
 * starting it takes 270. For products that is 400 and 260, so nothing may hold up the steps that
 * long.
 *
 * Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_AMX_STREAM_H
#define KT_AMX_STREAM_H

#include "../moe/beside.h"
#include "../simd/unroll.h"
#include "amx_tiles.h"

enum {
  KT_AMX_TILES = 2048,              /* bytes of the weights of a step: two half tiles */
  KT_AMX_SLOT = KT_BESIDE_RING / 2, /* bytes of a slot of the ring, at most */
  KT_AMX_STORE_EVERY = 4,           /* slots */
  KT_AMX_RUNS = 10                  /* column blocks of 32768 columns */
};

/* Where the codes of a slot lie; what else unpacking needs: their scales, or tables. */
typedef struct kt_amx_codes {
  const uint8_t *at, *scale;
} kt_amx_codes;

/* One of 4 * steps equal parts of what unpacks a slot: `part`, a constant but in amx_blocks.h. */
typedef void kt_amx_unpack_fn(kt_amx_codes codes, uint8_t *tiles, const int part);

/* What tells formats apart: constants of the loop. */
typedef struct kt_amx_form {
  int int8;                 /* products of int8, else of bf16 */
  int steps;                /* of a slot */
  int size, scale_size;     /* bytes of the codes of a slot, and of their scales */
  kt_amx_unpack_fn *unpack; /* NULL: codes are tiles */
} kt_amx_form;

/* The codes of a strip: slots side by side in each run. */
typedef struct kt_amx_strip {
  kt_amx_codes run[KT_AMX_RUNS];
  int64_t slots[KT_AMX_RUNS], runs;
} kt_amx_strip;

typedef kt_amx_strip kt_amx_strip_fn(const kt_weight *w, int64_t strip);

/* One step: products of the half tiles at `from`; BEFORE(0) .. BEFORE(3) come before them, PART(0)
 * .. PART(3) behind. Weights that come from memory are asked for first. A macro, as parts must be
 * constants. */
#define KT_AMX_STEP(from, half, BEFORE, PART)                                                      \
  do {                                                                                             \
    BEFORE(0);                                                                                     \
    KT_AMX_LOAD(6, from, KT_AMX_LINE);                                                             \
    if (!form.unpack) KT_AMX_LOAD(7, (from) + (half), KT_AMX_LINE);                                \
    KT_AMX_LOAD_PASSING(4, x0, stride);                                                            \
    KT_AMX_PRODUCT(form.int8, 0, 4, 6);                                                            \
    PART(0);                                                                                       \
    BEFORE(1);                                                                                     \
    if (form.unpack) KT_AMX_LOAD(7, (from) + (half), KT_AMX_LINE);                                 \
    KT_AMX_PRODUCT(form.int8, 1, 4, 7);                                                            \
    PART(1);                                                                                       \
    if (both) BEFORE(2);                                                                           \
    if (both) KT_AMX_LOAD_PASSING(5, x1, stride);                                                  \
    if (!form.unpack) kt_beside_step(beside);                                                      \
    if (both) KT_AMX_PRODUCT(form.int8, 2, 5, 6);                                                  \
    PART(2);                                                                                       \
    if (both) BEFORE(3);                                                                           \
    if (both) KT_AMX_PRODUCT(form.int8, 3, 5, 7);                                                  \
    PART(3);                                                                                       \
    if (form.unpack) kt_beside_step(beside);                                                       \
  } while (0)

#define KT_AMX_NOTHING(n) ((void)0)
#define KT_AMX_PART(n) form.unpack(next, room, n)
#define KT_AMX_LATER_PART(n) KT_AMX_PART(4 + (n))

/* ---- Codes that are unpacked -------------------------------------------------- */

/* Two halves (`both`) or one times a strip; behind its end the slot of `following` is unpacked. */
KT_INLINE void kt_amx_pass(const kt_amx_form form, const int both, const kt_amx_strip *w,
                           kt_amx_codes following, const uint8_t *const x[2], int64_t stride,
                           void *const sums[2], kt_beside *beside) {
  const uint8_t *x0 = x[0], *x1 = x[1];
  int slot = beside->slot;
  kt_amx_zero_sums(both);
  for (int64_t run = 0; run < w->runs; run++) {
    kt_amx_codes at = w->run[run];
    const kt_amx_codes behind = run + 1 < w->runs ? w->run[run + 1] : following;
    for (int64_t i = w->slots[run]; i > 0; i--) {
      const kt_amx_codes next =
          i > 1 ? (kt_amx_codes){at.at + form.size, at.scale + form.scale_size} : behind;
      const uint8_t *const tiles = beside->ring + slot * KT_AMX_SLOT;
      uint8_t *const room = beside->ring + (slot ^ 1) * KT_AMX_SLOT;
      KT_AMX_STEP(tiles, KT_AMX_TILES / 2, KT_AMX_NOTHING, KT_AMX_PART);
      x0 += KT_AMX_LINE, x1 += KT_AMX_LINE;
      if (form.steps > 1) {
        KT_AMX_STEP(tiles + KT_AMX_TILES, KT_AMX_TILES / 2, KT_AMX_NOTHING, KT_AMX_LATER_PART);
        x0 += KT_AMX_LINE, x1 += KT_AMX_LINE;
      }
      if (i % KT_AMX_STORE_EVERY == 0) KT_AMX_STORE(6, beside->spare, KT_AMX_LINE);
      at = next;
      slot ^= 1;
    }
  }
  beside->slot = slot;
  kt_amx_store_sums(both, sums);
}

/* The strip of a format of one run. */
KT_INLINE kt_amx_strip kt_amx_whole_strip(const uint8_t *codes, const uint8_t *scale,
                                          int64_t slots) {
  kt_amx_strip whole;
  whole.run[0] = (kt_amx_codes){codes, scale}, whole.slots[0] = slots, whole.runs = 1;
  return whole;
}

static inline void kt_amx_give_back(void) { _tile_release(); }

/* Tiles for all halves, unless they are configured so already. */
KT_INLINE void kt_amx_prepare(kt_beside *beside, const kt_halves *h, int line) {
  if (beside->rows == (int32_t)h->rows && beside->line == line) return;
  kt_amx_configure_halves(h, line);
  beside->rows = (int32_t)h->rows, beside->line = line;
  beside->leave = kt_amx_give_back;
}

/* ---- Codes that are tiles ------------------------------------------------------
 *
 * Of more than two halves of tokens, columns are cut into chunks whose weights stay in L1: all
 * passes over a chunk come before the next one, each second time in the other direction, so that
 * the pass at the turn leaves its sums in tiles. The others leave them in `out`, from where they
 * are loaded again, which changes no bits. (128 experts of 64 tokens, one core of a Xeon with AMX:
 * INT8 1.02 times as fast, BF16 1.01; 32 experts of 256 tokens: 1.02 and 1.05.) */

enum { KT_AMX_CHUNK = 16 /* steps */ };

/* Half 2 * pass of tokens and, if there is one, the next: their first tokens. */
typedef struct kt_amx_pair {
  int both;
  int64_t start[2];
} kt_amx_pair;

static inline kt_amx_pair kt_amx_pair_of(const kt_halves *h, int64_t pass) {
  const int both = 2 * pass + 1 < h->count;
  return (kt_amx_pair){both, {kt_half_start(h, 2 * pass), kt_half_start(h, 2 * pass + both)}};
}

/* Tiles 2i and 2i + 1. */
#define KT_AMX_TWO(instruction, i, first, second)                                                  \
  do {                                                                                             \
    uint8_t *const at = (uint8_t *)(out + (i)->start[(first) / 2] * KT_STRIP);                     \
    instruction(first, at, 2 * KT_AMX_LINE);                                                       \
    instruction(second, at + KT_AMX_LINE, 2 * KT_AMX_LINE);                                        \
  } while (0)

/* From the sums of one pair to those of another, which begin as zero in the first chunk. The last
 * half begins in the one before: where it is alone, a token of both is loaded for one before it is
 * stored for the other. */
static inline void kt_amx_change(const kt_amx_pair *from, const kt_amx_pair *to, int first,
                                 float *out) {
  if (to->both && !from->both && !first) KT_AMX_TWO(KT_AMX_LOAD, to, 2, 3);
  KT_AMX_TWO(KT_AMX_STORE, from, 0, 1);
  if (!first) KT_AMX_TWO(KT_AMX_LOAD, to, 0, 1);
  if (from->both) KT_AMX_TWO(KT_AMX_STORE, from, 2, 3);
  if (to->both && from->both && !first) KT_AMX_TWO(KT_AMX_LOAD, to, 2, 3);
}

KT_INLINE void kt_amx_chunk(const kt_amx_form form, const int both, const uint8_t *at,
                            int64_t steps, const uint8_t *x0, const uint8_t *x1, int64_t stride,
                            kt_beside *beside) {
  for (int64_t i = steps; i > 0; i--) {
    KT_AMX_STEP(at, KT_AMX_TILES / 2, KT_AMX_NOTHING, KT_AMX_NOTHING);
    x0 += KT_AMX_LINE, x1 += KT_AMX_LINE;
    if (i % KT_AMX_STORE_EVERY == 0) KT_AMX_STORE(6, beside->spare, KT_AMX_LINE);
    at += form.size;
  }
}

KT_INLINE void kt_amx_stream_chunks(const kt_amx_form form, const kt_amx_strip *w, const uint8_t *x,
                                    int64_t stride, const kt_halves *h, kt_beside *beside,
                                    float *out) {
  const int64_t passes = (h->count + 1) / 2;
  int64_t pass = beside->backward ? passes - 1 : 0, turn = beside->backward ? -1 : 1;
  kt_amx_pair own = kt_amx_pair_of(h, pass);
  for (int64_t run = 0; run < w->runs; run++) {
    const int64_t steps = w->slots[run], chunks = (steps + KT_AMX_CHUNK - 1) / KT_AMX_CHUNK;
    for (int64_t c = 0; c < chunks; c++, turn = -turn) {
      const int64_t start = steps * c / chunks, count = steps * (c + 1) / chunks - start;
      const uint8_t *const at = w->run[run].at + start * form.size;
      const int first = run == 0 && c == 0;
      if (first) kt_amx_zero_sums(1);
      for (int64_t p = 0; p < passes; p++) {
        if (p > 0) {
          const kt_amx_pair before = own;
          own = kt_amx_pair_of(h, pass += turn);
          kt_amx_change(&before, &own, first, out);
          if (first) kt_amx_zero_sums(1);
        }
        const uint8_t *const x0 = x + own.start[0] * stride + start * KT_AMX_LINE;
        const uint8_t *const x1 = x + own.start[1] * stride + start * KT_AMX_LINE;
        if (own.both)
          kt_amx_chunk(form, 1, at, count, x0, x1, stride, beside);
        else
          kt_amx_chunk(form, 0, at, count, x0, x1, stride, beside);
      }
    }
    x += steps * KT_AMX_LINE;
  }
  KT_AMX_TWO(KT_AMX_STORE, &own, 0, 1);
  if (own.both) KT_AMX_TWO(KT_AMX_STORE, &own, 2, 3);
  beside->backward = pass > 0;
}

/* ---- All ----------------------------------------------------------------------- */

/* kt_stream_fn, but for `sums`; form and strip_of are constants. tables: NULL, or of all slots. */
KT_INLINE void kt_amx_stream(const kt_amx_form form, kt_amx_strip_fn *strip_of, const kt_weight *w,
                             int64_t strip, const uint8_t *x, int64_t stride, int64_t tokens,
                             const void *tables, kt_beside *beside, float *out) {
  kt_amx_strip own = strip_of(w, strip);
  kt_amx_codes following =
      beside->following ? strip_of(beside->following, beside->following_strip).run[0] : own.run[0];
  const kt_halves h = kt_halves_of(tokens);
  const int64_t passes = (h.count + 1) / 2;
  int64_t steps = 0;
  if (tables) own.run[0].scale = following.scale = tables;
  for (int64_t run = 0; run < own.runs; run++) steps += own.slots[run] * form.steps;
  kt_amx_prepare(beside, &h, KT_AMX_LINE);
  kt_beside_start(beside, steps * passes);
  if (!form.unpack) {
    kt_amx_stream_chunks(form, &own, x, stride, &h, beside, out);
    return;
  }
  if (beside->ready != own.run[0].at) {
    uint8_t *const tiles = beside->ring + beside->slot * KT_AMX_SLOT;
    KT_UNROLL(8)
    for (int part = 0; part < 4 * form.steps; part++) form.unpack(own.run[0], tiles, part);
  }
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t half = 2 * (beside->backward ? passes - 1 - pass : pass);
    const int both = half + 1 < h.count;
    const int64_t start[2] = {kt_half_start(&h, half), kt_half_start(&h, half + both)};
    const uint8_t *const rows[2] = {x + start[0] * stride, x + start[1] * stride};
    void *const sums[2] = {out + start[0] * KT_STRIP, out + start[1] * KT_STRIP};
    const kt_amx_codes next = pass + 1 < passes ? own.run[0] : following;
    if (both)
      kt_amx_pass(form, 1, &own, next, rows, stride, sums, beside);
    else
      kt_amx_pass(form, 0, &own, next, rows, stride, sums, beside);
  }
  beside->ready = following.at, beside->ready_steps = form.steps;
  beside->backward ^= 1;
}

/* Defines the kt_product_fn of a format from its stream; `fewer` is the product of fewer tokens
 * than AMX is faster for. */
#define KT_AMX_DEFINE_PRODUCT(format, fewer)                                                       \
  void kt_##format##_product_amx(const kt_weight *w, int64_t strip, int64_t strips,                \
                                 const uint8_t *x, int64_t stride, int64_t tokens, float *out,     \
                                 uint8_t *panel) {                                                 \
    if (tokens < kt_least_tokens(&w->layout))                                                      \
      fewer(w, strip, strips, x, stride, tokens, out, panel);                                      \
    else                                                                                           \
      kt_streamed_product(kt_##format##_stream_amx, w, strip, strips, x, stride, tokens, out,      \
                          panel);                                                                  \
  }

#endif
