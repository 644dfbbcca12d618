/* transposed_amx.h - the loop of transposed.h with AMX, for every format.
 *
 * Packed weights are decoded by squares of 16 rows x 16 columns ("unit"), in four parts, each of
 * which gives one line of an int8 tile or two of a bf16 tile. A chunk, 2 to 8 steps of 32 columns
 * (of the strip: 32 rows of w as bf16, 64 as int8), is half of a ring in the first cache. While it
 * is multiplied with all tokens, a part or more of the next chunk is decoded behind each product of
 * tiles: decoding alone, or waiting for memory in it, would leave AMX idle, and it falls asleep.
 * What the chunk after that needs is prefetched to L2. Sums of a chunk start with those of the one
 * before, which lie in memory; that is cheaper than decoding for each token tile anew. Where memory
 * binds and no other tokens need these tiles, they stay there.
 *
 * Four tiles of sums: two halves of tokens x 32 columns, or of split rows the same half's high and
 * low codes. The last half of an odd number is alone. Include after KT_TARGET_BEGIN(AMX). */
#ifndef KT_TRANSPOSED_AMX_H
#define KT_TRANSPOSED_AMX_H

#include "../gemm/amx_tiles.h"
#include "../simd/unroll.h"
#include "transposed.h"

/* Constants of decoders. */
typedef struct kt_unpack_tables {
  __m512i a, b, c, d;
} kt_unpack_tables;

/* A unit on its way. */
typedef struct kt_unpack_unit {
  const uint8_t *codes, *ahead; /* its codes, and those to be prefetched */
  const kt_packed_square *square;
  int half;        /* rows 16 * half ... of its square */
  uint8_t *to;     /* its first line */
  __m512i kept[4]; /* from a part to the next, or of all units of a chunk */
  int built;       /* 0 before the first unit of a chunk; the rest is the format's */
  float *scale;    /* [32] of the unit, from part 0 on */
} kt_unpack_unit;

typedef struct kt_unpack_form {
  int int8;              /* tiles; else bf16 */
  int wide;              /* a unit has all 32 columns */
  int half_step, column; /* bytes to the codes of the second half of rows, of columns */
  int by_columns;        /* wide: the units of a square have all its rows, half of its columns */
  int plain;             /* codes are the numbers: memory binds, not decoding */
  kt_packed_square (*square)(const kt_weight *w, int64_t n, int64_t column);
  void (*part)(const kt_unpack_tables *t, kt_unpack_unit *u, int q); /* q: a constant, or wide */
} kt_unpack_form;

/* Bytes to the codes of a unit in its square, and to its first line from that of unit 0. */
typedef struct kt_unit_place {
  int32_t codes, to;
} kt_unit_place;

/* What is still to be decoded of a chunk. */
typedef struct kt_unpacking {
  const kt_unit_place *places;    /* of eight units */
  const kt_packed_square *square; /* of its first rows */
  uint64_t ahead;                 /* squares from there to what is prefetched */
  uint8_t *tiles;
  uint64_t unit, units;
  int part;
  kt_unpack_unit now;
} kt_unpacking;

#define KT_LOAD_TILE(tile, from, stride)                                                           \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"((size_t)(stride))            \
                   : "memor"                                                                       \
                     "y")
#define KT_STORE_TILE(tile, to, stride)                                                            \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((size_t)(stride))         \
                   : "memory")
#define KT_MULTIPLY_TILES(int8, sum, a, b)                                                         \
  do {                                                                                             \
    if (int8)                                                                                      \
      _tile_dpbssd(sum, a, b);                                                                     \
    else                                                                                           \
      _tile_dpbf16ps(sum, a, b);                                                                   \
  } while (0)

/* ---- Decoding -------------------------------------------------------------------- */

/* Units of a square, then of the next. */
KT_INLINE int64_t kt_units(const kt_unpack_form f) { return f.wide ? 2 : 4; }

KT_INLINE void kt_place_units(const kt_unpack_form f, kt_unit_place place[8]) {
  for (int i = 0; i < 8; i++) {
    const int square = f.wide ? i / 2 : i / 4, half = f.wide ? i % 2 : i / 2 % 2;
    const int j = f.wide ? 0 : i % 2;
    place[i].codes = half * f.half_step + j * f.column;
    const int other = f.by_columns && half ? KT_BF16_HALF_TILE - 512 : 0;
    place[i].to = j * KT_BF16_HALF_TILE + other +
                  (f.int8 ? square * 512 + half * 256 : square * KT_BF16_TILE + half * 512);
  }
}

KT_INLINE void kt_start_unit(const kt_unpack_form f, kt_unpacking *d) {
  const kt_unit_place *const place = d->places + d->unit % 8;
  const kt_packed_square *const square = d->square + d->unit / (uint64_t)kt_units(f);
  const uint64_t eight = KT_BF16_TILE * (f.int8 ? 1 : 8 / (uint64_t)kt_units(f));
  d->now.square = square;
  d->now.codes = square->codes + place->codes;
  d->now.ahead = square[d->ahead].codes + place->codes;
  d->now.half = (int)(f.wide ? d->unit % 2 : d->unit / 2 % 2);
  d->now.to = d->tiles + d->unit / 8 * eight + place->to;
  d->unit++;
}

KT_INLINE void kt_decode_part(const kt_unpack_form f, const kt_unpack_tables *t, kt_unpacking *d,
                              int q) {
  if (q == 0) kt_start_unit(f, d);
  f.part(t, &d->now, q);
}

/* Behind product n (0 .. 3) of a step that decodes `parts` parts: a constant. */
KT_INLINE void kt_decode_some(const kt_unpack_form f, const int parts, const kt_unpack_tables *t,
                              kt_unpacking *d, const int n) {
  if (parts == 2 && n % 2 == 0) {
    kt_decode_part(f, t, d, d->part);
    d->part = (d->part + 1) & 3;
  }
  KT_UNROLL(8)
  for (int i = 0; i < parts / 4; i++) kt_decode_part(f, t, d, (n * (parts / 4) + i) & 3);
}

/* The steps of up to `most` for which there is something to decode. */
KT_INLINE int64_t kt_busy_steps(const int parts, const kt_unpacking *d, int64_t most) {
  const int64_t left = 4 * (int64_t)(d->units - d->unit) + (d->part ? 4 - d->part : 0);
  return left / parts < most ? left / parts : most;
}

KT_INLINE void kt_decode_rest(const kt_unpack_form f, const kt_unpack_tables *t, kt_unpacking *d) {
  for (; d->part; d->part = (d->part + 1) & 3) f.part(t, &d->now, d->part);
  while (d->unit < d->units) {
    KT_UNROLL(4)
    for (int q = 0; q < 4; q++) kt_decode_part(f, t, d, q);
  }
}

/* ---- One pair of halves, one chunk --------------------------------------------------- */

/* A chunk that is multiplied. */
typedef struct kt_tiles {
  const uint8_t *tiles;
  int64_t steps, stride; /* stride: of activations */
  int first, last;       /* of the strip */
  int alone;             /* sums stay in tiles from chunk to chunk: there is one pair of halves.
                          * Not where decoding takes long: what stores tiles would be off by then */
} kt_tiles;

KT_INLINE void kt_load_sums(const int both, int32_t *const sums[2]) {
  KT_LOAD_TILE(0, sums[0], 2 * KT_AMX_LINE);
  KT_LOAD_TILE(1, sums[0] + KT_AMX_ROWS, 2 * KT_AMX_LINE);
  if (!both) return;
  KT_LOAD_TILE(2, sums[1], 2 * KT_AMX_LINE);
  KT_LOAD_TILE(3, sums[1] + KT_AMX_ROWS, 2 * KT_AMX_LINE);
}

/* Steps of a chunk, and what is decoded meanwhile. */
KT_INLINE void kt_multiply_steps(const kt_unpack_form f, const int both, const int parts,
                                 const kt_unpack_tables *t, kt_unpacking *d, int64_t steps,
                                 const uint8_t *b, const uint8_t *x0, const uint8_t *x1,
                                 int64_t stride) {
  for (const uint8_t *const end = b + steps * KT_BF16_TILE; b < end;
       b += KT_BF16_TILE, x0 += KT_AMX_LINE, x1 += KT_AMX_LINE) {
    KT_LOAD_TILE(6, b, KT_AMX_LINE);
    KT_LOAD_TILE(4, x0, stride);
    KT_MULTIPLY_TILES(f.int8, 0, 4, 6);
    kt_decode_some(f, parts, t, d, 0);
    KT_LOAD_TILE(7, b + KT_BF16_HALF_TILE, KT_AMX_LINE);
    KT_MULTIPLY_TILES(f.int8, 1, 4, 7);
    kt_decode_some(f, parts, t, d, 1);
    if (both) {
      KT_LOAD_TILE(5, x1, stride);
      KT_MULTIPLY_TILES(f.int8, 2, 5, 6);
    }
    kt_decode_some(f, parts, t, d, 2);
    if (both) KT_MULTIPLY_TILES(f.int8, 3, 5, 7);
    kt_decode_some(f, parts, t, d, 3);
  }
}

KT_INLINE void kt_multiply_chunk(const kt_unpack_form f, const int both, const int parts,
                                 const kt_unpack_tables *t, kt_unpacking *d, const kt_tiles *chunk,
                                 const uint8_t *const x[2], int32_t *const sums[2]) {
  const int64_t busy = kt_busy_steps(parts, d, chunk->steps);
  if (chunk->first)
    kt_amx_zero_sums(both);
  else if (!chunk->alone)
    kt_load_sums(both, sums);
  kt_multiply_steps(f, both, parts, t, d, busy, chunk->tiles, x[0], x[1], chunk->stride);
  kt_multiply_steps(f, both, 0, t, d, chunk->steps - busy, chunk->tiles + busy * KT_BF16_TILE,
                    x[0] + busy * KT_AMX_LINE, x[1] + busy * KT_AMX_LINE, chunk->stride);
  if (chunk->alone && !chunk->last) return;
  KT_STORE_TILE(0, sums[0], 2 * KT_AMX_LINE);
  KT_STORE_TILE(1, sums[0] + KT_AMX_ROWS, 2 * KT_AMX_LINE);
  if (both) {
    KT_STORE_TILE(2, sums[1], 2 * KT_AMX_LINE);
    KT_STORE_TILE(3, sums[1] + KT_AMX_ROWS, 2 * KT_AMX_LINE);
  }
}

/* ---- A strip -------------------------------------------------------------------------- */

/* The parts of a step that are enough for a chunk in `steps` steps; of 32, the rest follows. */
static inline int kt_parts_of_step(int least, int64_t parts, int64_t steps) {
  int each = least;
  while (each < 32 && each * steps < parts) each *= 2;
  return each;
}

/* Of few tokens and where memory binds, a ring that leaves room in the first cache for what is
 * decoded and multiplied. Other decoders prepare something for each chunk. */
KT_INLINE int64_t kt_steps_of_chunk(const kt_unpack_form f, int64_t pairs) {
  return !f.plain || pairs > 4 ? KT_TRANSPOSED_STEPS : pairs == 1 ? 2 : 4;
}

/* From the chunk that is decoded to what is prefetched: at most as far in the next strip. */
KT_INLINE int64_t kt_steps_ahead(const kt_unpack_form f, int64_t pairs, int64_t chunk,
                                 int64_t steps) {
  const int64_t ahead = f.plain && pairs == 1 ? 2 * chunk : chunk;
  return ahead < steps ? ahead : steps;
}

static inline int64_t kt_chunk_start(int64_t steps, int64_t chunks, int64_t i) {
  return steps * i / chunks;
}

KT_INLINE void kt_find_squares(const kt_unpack_form f, const kt_transposed *t, int64_t column,
                               kt_packed_square *squares) {
  const int64_t inside = column < t->end ? column : t->end - KT_STRIP; /* nothing to prefetch */
  for (int64_t m = 0, start = 0; m < t->matrices; start += t->w[m++].rows)
    for (int64_t n = 0; n < t->w[m].rows; n += KT_STRIP)
      if (start + n >= t->from && start + n < t->to) *squares++ = f.square(t->w + m, n, inside);
}

/* What all loops of a strip need. unit: what a code of an integer format is worth, in scales. */
typedef struct kt_strip_job {
  const kt_unpack_tables *tables;
  const kt_transposed *job;
  kt_halves halves;
  int32_t *sums;
  float unit, *out;
} kt_strip_job;

/* out[t] = scale * (256 * high + low), or out[t] + that, for the new tokens of a half. */
KT_INLINE void kt_join_sums(const kt_strip_job *s, int64_t half) {
  const kt_transposed *const job = s->job;
  const int64_t start = kt_half_start(&s->halves, half), fresh = kt_half_new(&s->halves, half);
  const int64_t block = s->halves.rows * KT_STRIP;
  const int32_t *high = s->sums + 2 * half * block + (fresh - start) * KT_STRIP;
  const __m512 step = _mm512_set1_ps(256.0f);
  for (int64_t i = fresh; i < start + s->halves.rows; i++, high += KT_STRIP) {
    float own;
    __builtin_memcpy(&own, job->rows + i * job->stride + 2 * job->matrices * job->w[0].rows,
                     sizeof own);
    const __m512 scale = _mm512_set1_ps(own * s->unit);
    for (int v = 0; v < KT_STRIP; v += 16) {
      const __m512 h = _mm512_cvtepi32_ps(_mm512_loadu_si512(high + v));
      const __m512 l = _mm512_cvtepi32_ps(_mm512_loadu_si512(high + block + v));
      float *const to = s->out + i * KT_STRIP + v;
      const __m512 before = job->adds ? _mm512_loadu_ps(to) : _mm512_set1_ps(-0.0f);
      const __m512 sum = _mm512_mul_ps(_mm512_fmadd_ps(h, step, l), scale);
      _mm512_storeu_ps(to, _mm512_add_ps(sum, before));
    }
  }
}

/* Decodes a chunk while another, `at` steps into the strip, is multiplied with all tokens. Blocks:
 * halves of tokens, twice as many of split rows. */
KT_INLINE void kt_multiply_all(const kt_unpack_form f, const int parts, const kt_strip_job *s,
                               kt_unpacking *given, const kt_tiles *chunk, int64_t at) {
  const kt_transposed *const job = s->job;
  const kt_halves h = s->halves;
  const kt_unpack_tables tables = *s->tables; /* in registers, as the next */
  kt_unpacking d = *given;
  const int64_t blocks = f.int8 ? 2 * h.count : h.count, cols = job->matrices * job->w[0].rows;
  for (int64_t i = 0; i < blocks; i += 2) {
    const uint8_t *x[2];
    int32_t *to[2];
    for (int k = 0; k < 2; k++) {
      const int64_t half = f.int8 ? i / 2 : i + k < blocks ? i + k : i;
      x[k] = job->rows + kt_half_start(&h, half) * job->stride + (f.int8 ? k * cols : 0) +
             (f.int8 ? 1 : 2) * job->from + at * KT_AMX_LINE;
      to[k] = s->sums + (i + k) * h.rows * KT_STRIP;
    }
    if (f.int8 || i + 1 < blocks)
      kt_multiply_chunk(f, 1, parts, &tables, &d, chunk, x, to);
    else
      kt_multiply_chunk(f, 0, parts, &tables, &d, chunk, x, to);
    if (f.int8 && chunk->last) kt_join_sums(s, i / 2);
  }
  kt_decode_rest(f, &tables, &d);
}

/* The numbers of parts that there are loops for. */
KT_INLINE void kt_multiply_some(const kt_unpack_form f, const int parts, const kt_strip_job *s,
                                kt_unpacking *d, const kt_tiles *chunk, int64_t at) {
  switch (parts) {
  case 2:
    if (f.wide) kt_multiply_all(f, 2, s, d, chunk, at);
    break;
  case 4: kt_multiply_all(f, 4, s, d, chunk, at); break;
  case 8: kt_multiply_all(f, 8, s, d, chunk, at); break;
  case 16: kt_multiply_all(f, 16, s, d, chunk, at); break;
  default: kt_multiply_all(f, f.int8 ? 32 : 16, s, d, chunk, at);
  }
}

/* Of bf16 rows sums are numbers already, but the last half may lie too far behind. */
static inline void kt_close_gap(const kt_halves *h, float *out) {
  const int64_t last = h->count - 1, start = kt_half_start(h, last), fresh = kt_half_new(h, last);
  if (fresh == start) return;
  __builtin_memmove(out + fresh * KT_STRIP, out + (last * h->rows + fresh - start) * KT_STRIP,
                    (size_t)((h->tokens - fresh) * KT_STRIP) * sizeof *out);
}

static inline void kt_add_sums(const kt_halves *h, const float *sums, float *out) {
  for (int64_t i = 0; i < h->tokens * KT_STRIP; i += 16)
    _mm512_storeu_ps(out + i, _mm512_add_ps(_mm512_loadu_ps(out + i), _mm512_loadu_ps(sums + i)));
}

/* Decoding `steps` steps from `first` on, of the strip that job->squares begin with. */
KT_INLINE kt_unpacking kt_unpacking_of(const kt_unpack_form f, const kt_transposed *job,
                                       const kt_unit_place *places, float *scale, int64_t first,
                                       int64_t steps, int64_t ahead) {
  const int64_t each = f.int8 ? 2 : 1; /* squares of a step */
  return (kt_unpacking){.places = places,
                        .square = job->squares + first * each,
                        .ahead = (uint64_t)(ahead * each),
                        .tiles = job->ring + job->chunk * KT_TRANSPOSED_CHUNK,
                        .units = (uint64_t)(steps * each * kt_units(f)),
                        .now.scale = scale};
}

KT_INLINE void kt_transposed_strip(const kt_unpack_form f, const kt_unpack_tables *t, float unit,
                                   kt_transposed *job, float *out) {
  const int64_t squares = (job->to - job->from) / KT_STRIP;
  const int64_t steps = f.int8 ? squares / 2 : squares;
  const kt_halves h = kt_halves_of(job->tokens);
  const int64_t pairs = f.int8 ? h.count : (h.count + 1) / 2;
  const int64_t each = kt_steps_of_chunk(f, pairs), chunks = (steps + each - 1) / each;
  const int64_t ahead = kt_steps_ahead(f, pairs, (steps + chunks - 1) / chunks, steps);
  const kt_strip_job strip = {.tables = t,
                              .job = job,
                              .halves = h,
                              .sums = f.int8 || job->adds ? job->sums : (void *)out,
                              .unit = unit,
                              .out = out};
  _Alignas(64) float scale[KT_STRIP];
  kt_unit_place places[8];
  kt_place_units(f, places);
  kt_amx_configure_halves(&h, KT_AMX_LINE);
  if (!job->started) {
    kt_find_squares(f, job, job->column, job->squares);
    kt_find_squares(f, job, job->column + KT_STRIP, job->squares + squares);
    const int64_t end = kt_chunk_start(steps, chunks, 1);
    kt_unpacking d = kt_unpacking_of(f, job, places, scale, 0, end, ahead);
    kt_decode_rest(f, t, &d);
    job->started = 1;
  }
  for (int64_t i = 0; i < chunks; i++) {
    const int64_t first = kt_chunk_start(steps, chunks, i);
    const int64_t last = kt_chunk_start(steps, chunks, i + 1);
    const kt_tiles chunk = {job->ring + job->chunk * KT_TRANSPOSED_CHUNK,
                            last - first,
                            job->stride,
                            i == 0,
                            i + 1 == chunks,
                            f.plain && pairs == 1};
    int64_t next = last, more = kt_chunk_start(steps, chunks, i + 2) - last;
    job->chunk ^= 1;
    if (last == steps) { /* then the next strip */
      __builtin_memcpy(job->squares, job->squares + squares,
                       (size_t)squares * sizeof *job->squares);
      kt_find_squares(f, job, job->column + 2 * KT_STRIP, job->squares + squares);
      next = 0;
      more = job->column + KT_STRIP < job->end ? kt_chunk_start(steps, chunks, 1) : 0;
    }
    kt_unpacking d = kt_unpacking_of(f, job, places, scale, next, more, ahead);
    const int parts = kt_parts_of_step(f.wide ? 2 : 4, 4 * (int64_t)d.units, chunk.steps * pairs);
    kt_multiply_some(f, parts, &strip, &d, &chunk, first);
  }
  _tile_release();
  if (!f.int8) kt_close_gap(&h, (float *)(void *)strip.sums);
  if (!f.int8 && job->adds) kt_add_sums(&h, job->sums, out);
  job->column += KT_STRIP;
}

/* ---- What decoders share ------------------------------------------------------------------ */

/* 16 bytes of each of four lines, `step` bytes apart: without the port of shuffles. */
KT_INLINE __m512i kt_four_lines(const uint8_t *from, int64_t step) {
  __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)from));
  const __m128i *const one = (const __m128i *)(const void *)(from + step);
  const __m128i *const two = (const __m128i *)(const void *)(from + 2 * step);
  const __m128i *const three = (const __m128i *)(const void *)(from + 3 * step);
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128(one));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128(two));
  return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128(three));
}

KT_INLINE void kt_prefetch_line(const uint8_t *at) { __builtin_prefetch(at, 0, 2); }

/* Lanes with four rows of four bytes of columns: columns with four rows. */
KT_INLINE __m512i kt_rows_to_columns(void) {
  return _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

#endif
