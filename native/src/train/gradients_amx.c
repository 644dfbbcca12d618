/* Sums of outer products with AMX.
 *
 * Factors a are cut into two numbers of bf16, high + low, which loses less than 2^-16 of them: A
 * tiles, 16 ranks x 32 slots. Rows of two slots are put in turn: B tiles, 32 slots x 16 columns.
 * While tiles of 32 columns are multiplied, those of the next are made. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_tiles.h"
#include "../simd/transpose_avx512.h"
#include "../simd/unroll.h"
#include "gradients.h"

enum {
  LEAST_SLOTS = 8, /* of fewer, most of a tile would be zeros */
  TILE = KT_AMX_ROWS * KT_AMX_LINE,
  SLOTS = 32,                              /* of a tile */
  STEPS = KT_OUTER_SLOTS / SLOTS,          /* of all slots */
  RANKS = 64,                              /* at a time */
  FACTORS = 2 * TILE * STEPS * RANKS / 16, /* bytes: high and low for each step */
  ROWS = 2 * TILE * STEPS                  /* bytes: two tiles for each step */
};

_Static_assert(FACTORS + 2 * ROWS + 4 * TILE == KT_OUTER_SCRATCH, "scratch");

typedef struct layout {
  uint8_t *factors, *rows[2];
  float *sums; /* [2][16][32] */
  int64_t steps;
} layout;

/* ---- Factors ---------------------------------------------------------------------- */

/* 16 slots x 16 ranks, as columns; 0 where there is neither. */
KT_INLINE void load_factors(const kt_outer *o, int64_t slot, int64_t rank, __m512i column[16]) {
  const int64_t left = o->rank - rank;
  const __mmask16 there = left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1);
  __m512i row[16];
  for (int i = 0; i < 16; i++)
    row[i] = slot + i < o->count
                 ? _mm512_maskz_loadu_epi32(there, o->a + (slot + i) * o->a_stride + rank)
                 : _mm512_setzero_si512();
  kt_transpose16(row, column);
}

/* High and low of 16 numbers. An Inf or NaN has no low. */
KT_INLINE void store_factors(__m512 value, uint8_t *high, uint8_t *low) {
  const __m256i upper = (__m256i)_mm512_cvtneps_pbh(value);
  const __m512 nearest = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
  const __mmask16 odd = _mm512_fpclass_ps_mask(nearest, 0x99); /* NaN, Inf */
  const __m512 rest = _mm512_maskz_sub_ps((__mmask16)~odd, value, nearest);
  _mm256_store_si256((__m256i *)(void *)high, upper);
  _mm256_store_si256((__m256i *)(void *)low, (__m256i)_mm512_cvtneps_pbh(rest));
}

/* Tiles of ranks rank .. rank + 15: for each step high, then low. */
static void make_factors(const kt_outer *o, int64_t rank, int64_t steps, uint8_t *to) {
  for (int64_t slot = 0; slot < steps * SLOTS; slot += 16) {
    uint8_t *const tile = to + slot / SLOTS * 2 * TILE + slot % SLOTS * 2;
    __m512i column[16];
    load_factors(o, slot, rank, column);
    for (int r = 0; r < 16; r++)
      store_factors(_mm512_castsi512_ps(column[r]), tile + r * KT_AMX_LINE,
                    tile + TILE + r * KT_AMX_LINE);
  }
}

/* ---- Rows ---------------------------------------------------------------------------- */

KT_INLINE const uint8_t *row_at(const kt_outer *o, int64_t i, int64_t c) {
  return o->b + (o->index ? o->index[i] : i) * o->b_stride + 2 * c;
}

/* Columns c .. c + 31 of all slots, each line two slots in turn; zeros behind the last. */
KT_INLINE void make_rows(const kt_outer *o, int64_t c, int64_t steps, uint8_t *to) {
  const __m512i step = _mm512_set1_epi32(0x00010001), second = _mm512_set1_epi32(0x00200000);
  const __m512i ascending = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order0 = _mm512_add_epi32(_mm512_mullo_epi32(ascending, step), second);
  const __m512i order1 = _mm512_add_epi32(order0, _mm512_set1_epi32(0x00100010));
  for (int64_t i = 0; i < steps * SLOTS; i += 2) {
    uint8_t *const line = to + i / SLOTS * 2 * TILE + i % SLOTS / 2 * KT_AMX_LINE;
    __m512i row0 = _mm512_setzero_si512(), row1 = row0;
    if (i < o->count) {
      row0 = _mm512_loadu_si512(row_at(o, i, c));
      __builtin_prefetch(row_at(o, i, c) + 2 * KT_AMX_LINE);
    }
    if (i + 1 < o->count) {
      row1 = _mm512_loadu_si512(row_at(o, i + 1, c));
      __builtin_prefetch(row_at(o, i + 1, c) + 2 * KT_AMX_LINE);
    }
    _mm512_store_si512(line, _mm512_permutex2var_epi16(row0, order0, row1));
    _mm512_store_si512(line + TILE, _mm512_permutex2var_epi16(row0, order1, row1));
  }
}

/* ---- Products -------------------------------------------------------------------------- */

/* sums[r][32 columns] of 16 ranks, or (both) 32. */
KT_INLINE void multiply(const int both, const layout *l, const uint8_t *factors,
                        const uint8_t *rows) {
  const int64_t next = l->steps * 2 * TILE; /* to the next 16 ranks */
  kt_amx_zero_sums(both);
  for (int64_t k = 0; k < l->steps; k++, factors += 2 * TILE, rows += 2 * TILE) KT_UNROLL(2)
  for (int part = 0; part < 2; part++) { /* high, low */
    const uint8_t *const tiles[2] = {rows, rows + TILE};
    const uint8_t *const a[2] = {factors + part * TILE, factors + part * TILE + next};
    kt_amx_multiply(0, both, tiles, a, KT_AMX_LINE);
  }
  void *const sums[2] = {l->sums, l->sums + 16 * 32};
  kt_amx_store_sums(both, sums);
  __asm__ volatile("" ::: "memory");
}

/* Rows of out along columns. */
KT_INLINE void put_along(const kt_outer *o, int64_t j, int64_t c, int64_t ranks,
                         const float *sums) {
  for (int64_t r = 0; r < ranks; r++)
    for (int v = 0; v < 32; v += 16) {
      float *const out = o->out + (j + r) * o->row + c + v;
      const __m512 sum = _mm512_loadu_ps(sums + r * 32 + v);
      _mm512_storeu_ps(out, o->fresh ? sum : _mm512_add_ps(sum, _mm512_loadu_ps(out)));
    }
}

/* Rows of out along ranks: up to 16. */
KT_INLINE void put_across(const kt_outer *o, int64_t j, int64_t c, int64_t ranks,
                          const float *sums) {
  const __mmask16 there = ranks >= 16 ? 0xffff : (__mmask16)((1u << ranks) - 1);
  for (int v = 0; v < 32; v += 16) {
    __m512i row[16], column[16];
    for (int r = 0; r < 16; r++) row[r] = _mm512_loadu_si512(sums + r * 32 + v);
    kt_transpose16(row, column);
    for (int i = 0; i < 16; i++) {
      float *const out = o->out + j + (c + v + i) * o->col;
      const __m512 sum = _mm512_castsi512_ps(column[i]);
      const __m512 before = o->fresh ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(there, out);
      _mm512_mask_storeu_ps(out, there, o->fresh ? sum : _mm512_add_ps(sum, before));
    }
  }
}

KT_INLINE void put(const kt_outer *o, int64_t j, int64_t c, int64_t ranks, const float *sums) {
  for (int64_t r = 0; r < ranks; r += 16) {
    const int64_t some = ranks - r < 16 ? ranks - r : 16;
    if (o->col == 1)
      put_along(o, j + r, c, some, sums + r * 32);
    else
      put_across(o, j + r, c, some, sums + r * 32);
  }
}

/* Ranks j .. j + ranks - 1, up to 64, of all columns. */
static void some_ranks(const kt_outer *o, const layout *l, int64_t j, int64_t ranks) {
  for (int64_t r = 0; r < ranks; r += 16)
    make_factors(o, j + r, l->steps, l->factors + r / 16 * l->steps * 2 * TILE);
  make_rows(o, 0, l->steps, l->rows[0]);
  for (int64_t c = 0; c < o->cols; c += 32) {
    const uint8_t *const rows = l->rows[c / 32 % 2];
    if (c + 32 < o->cols) make_rows(o, c + 32, l->steps, l->rows[(c / 32 + 1) % 2]);
    for (int64_t r = 0; r < ranks; r += 32) {
      const uint8_t *const factors = l->factors + r / 16 * l->steps * 2 * TILE;
      if (ranks - r > 16)
        multiply(1, l, factors, rows);
      else
        multiply(0, l, factors, rows);
      put(o, j + r, c, ranks - r < 32 ? ranks - r : 32, l->sums);
    }
  }
}

void kt_outer_amx(const kt_outer *o) {
  if (o->count < LEAST_SLOTS || o->count > KT_OUTER_SLOTS) {
    kt_gradients_avx512.outer(o);
    return;
  }
  uint8_t *const rows = o->scratch + FACTORS;
  const layout l = {.factors = o->scratch,
                    .rows = {rows, rows + ROWS},
                    .sums = (float *)(void *)(rows + 2 * ROWS),
                    .steps = (o->count + SLOTS - 1) / SLOTS};
  kt_amx_configure(2 * KT_AMX_ROWS);
  for (int64_t j = 0; j < o->rank; j += RANKS)
    some_ranks(o, &l, j, o->rank - j < RANKS ? o->rank - j : RANKS);
  _tile_release();
}

KT_TARGET_END
#endif
