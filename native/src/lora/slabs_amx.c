/* Products of slabs with AMX: tiles as in gemm/amx_tiles.h, a slab in tile 6, another in 7. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AMX)
#include "../gemm/amx_stream.h"
#include "slabs.h"

#include <string.h>

enum {
  TILE = KT_SLAB_BLOCK * KT_SLAB_LINE,
  AHEAD = 4096 /* bytes by which a slab is prefetched */
};

/* kt_amx_store_sums that compilers know to write memory: sums are local variables. */
KT_INLINE void store_sums(const int both, void *const sums[2]) {
  enum { LINE = KT_STRIP * 4 };
  KT_AMX_STORE(0, sums[0], LINE);
  KT_AMX_STORE(1, (uint8_t *)sums[0] + KT_SLAB_LINE, LINE);
  if (!both) return;
  KT_AMX_STORE(2, sums[1], LINE);
  KT_AMX_STORE(3, (uint8_t *)sums[1] + KT_SLAB_LINE, LINE);
}

/* ---- A ------------------------------------------------------------------------------ */

/* 32 columns of rows that lie apart. */
typedef struct panel {
  _Alignas(64) uint16_t row[2 * KT_AMX_ROWS][KT_SLAB_COLS];
} panel;

KT_INLINE void fill(panel *p, const uint16_t *const *rows, int64_t tokens, int64_t col) {
  for (int64_t t = 0; t < tokens; t++)
    _mm512_store_si512(p->row[t], _mm512_loadu_si512(rows[t] + col));
}

/* `two` slabs, `both` halves of tokens: constants. fresh: slabs may be in no cache. While columns
 * are multiplied the next ones are brought together. */
KT_INLINE void multiply(const int two, const int both, const int fresh,
                        const uint8_t *const slab[2], int64_t lines, const uint16_t *const *rows,
                        int64_t tokens, float (*sums)[2][KT_SLAB_ROWS]) {
  const uint8_t *slab0 = slab[0], *slab1 = slab[two];
  const int64_t cols = 2 * lines;
  panel turn[2];
  _Alignas(64) float found[2 * KT_AMX_ROWS][2][KT_SLAB_ROWS];
  void *const to[2] = {found[0], found[KT_AMX_ROWS]};
  kt_amx_zero_sums(1);
  fill(turn, rows, tokens, 0);
  for (int64_t k = 0; k < cols; k += KT_SLAB_COLS, slab0 += TILE, slab1 += TILE) {
    const panel *const now = turn + k / KT_SLAB_COLS % 2;
    for (int i = 0; fresh && i < TILE; i += KT_SLAB_LINE) {
      kt_beside_touch(slab0 + AHEAD + i);
      if (two) kt_beside_touch(slab1 + AHEAD + i);
    }
    KT_AMX_LOAD(6, slab0, KT_SLAB_LINE);
    KT_AMX_LOAD(4, now->row, KT_AMX_LINE);
    KT_AMX_PRODUCT(0, 0, 4, 6);
    if (two) KT_AMX_LOAD(7, slab1, KT_SLAB_LINE);
    if (two) KT_AMX_PRODUCT(0, 1, 4, 7);
    if (both) KT_AMX_LOAD(5, now->row + KT_AMX_ROWS, KT_AMX_LINE);
    if (both) KT_AMX_PRODUCT(0, 2, 5, 6);
    if (both && two) KT_AMX_PRODUCT(0, 3, 5, 7);
    if (k + KT_SLAB_COLS < cols)
      fill(turn + (k / KT_SLAB_COLS + 1) % 2, rows, tokens, k + KT_SLAB_COLS);
  }
  store_sums(both, to);
  memcpy(sums, found, (size_t)tokens * sizeof *sums);
}

static void pair(const uint8_t *const slab[2], int64_t lines, const uint16_t *const *rows,
                 int64_t tokens, float (*sums)[2][KT_SLAB_ROWS]) {
  kt_amx_configure_lines(KT_AMX_ROWS, KT_AMX_ROWS, KT_AMX_LINE);
  for (int64_t t = 0; t < tokens; t += 2 * KT_AMX_ROWS) {
    const int64_t some = tokens - t < 2 * KT_AMX_ROWS ? tokens - t : 2 * KT_AMX_ROWS;
    const int both = some > KT_AMX_ROWS;
    if (slab[1] && both) multiply(1, 1, t == 0, slab, lines, rows + t, some, sums + t);
    if (slab[1] && !both) multiply(1, 0, t == 0, slab, lines, rows + t, some, sums + t);
    if (!slab[1] && both) multiply(0, 1, t == 0, slab, lines, rows + t, some, sums + t);
    if (!slab[1] && !both) multiply(0, 0, t == 0, slab, lines, rows + t, some, sums + t);
  }
  _tile_release();
}

/* ---- B, behind a stream ------------------------------------------------------------- */

/* What is left of the two slabs behind whole blocks, with lines of zeros. */
static void last_block(const kt_slabs_at *p, uint8_t tiles[2][TILE]) {
  const int64_t whole = p->lines / KT_SLAB_BLOCK * KT_SLAB_BLOCK;
  const size_t size = (size_t)((p->lines - whole) * KT_SLAB_LINE);
  for (int i = 0; i < 2; i++) {
    memcpy(tiles[i], p->slab + i * p->apart + whole * KT_SLAB_LINE, size);
    memset(tiles[i] + size, 0, TILE - size);
  }
}

/* One half of tokens or two, of rows x; sums[i][t][32]. */
KT_INLINE void multiply_halves(const int both, const kt_slabs_at *p, const uint8_t tiles[2][TILE],
                               const uint8_t *const x[2], int64_t stride, void *const sums[2]) {
  const int64_t blocks = (p->lines + KT_SLAB_BLOCK - 1) / KT_SLAB_BLOCK;
  kt_amx_zero_sums(both);
  for (int64_t b = 0; b < blocks; b++) {
    const int whole = (b + 1) * KT_SLAB_BLOCK <= p->lines;
    const uint8_t *const at = p->slab + b * TILE;
    const uint8_t *const slab[2] = {whole ? at : tiles[0], whole ? at + p->apart : tiles[1]};
    const uint8_t *const rows[2] = {x[0] + b * KT_AMX_LINE, x[1] + b * KT_AMX_LINE};
    kt_amx_multiply(0, both, slab, rows, stride);
  }
  store_sums(both, sums);
}

/* The products of one half, of up to 32 columns, with tiles 6 and 7 as they are: in tiles 0, 1 and
 * 4, or 2, 3 and 5 (`odd`, a constant). While one half is stored the next is multiplied. */
KT_INLINE void begin_half(const int odd, const uint8_t *x, int64_t stride) {
  if (odd) {
    KT_AMX_ZERO(2);
    KT_AMX_ZERO(3);
    KT_AMX_LOAD(5, x, stride);
    KT_AMX_PRODUCT(0, 2, 5, 6);
    KT_AMX_PRODUCT(0, 3, 5, 7);
  } else {
    KT_AMX_ZERO(0);
    KT_AMX_ZERO(1);
    KT_AMX_LOAD(4, x, stride);
    KT_AMX_PRODUCT(0, 0, 4, 6);
    KT_AMX_PRODUCT(0, 1, 4, 7);
  }
}

KT_INLINE void end_half(const int odd, float *to) {
  enum { LINE = KT_STRIP * 4 };
  if (odd) {
    KT_AMX_STORE(2, to, LINE);
    KT_AMX_STORE(3, to + KT_SLAB_ROWS, LINE);
  } else {
    KT_AMX_STORE(0, to, LINE);
    KT_AMX_STORE(1, to + KT_SLAB_ROWS, LINE);
  }
}

/* Where half `i` of slots that follow each other begins, a half at least. The last one begins
 * within the one before, if need be, and stores some of its sums again. */
static int64_t half_at(int64_t i, int64_t half, int64_t tokens) {
  return (i + 1) * half <= tokens ? i * half : tokens - half;
}

static void small_in_a_row(const kt_slabs_at *p, const uint8_t tiles[2][TILE], const uint8_t *rows,
                           int64_t stride, int64_t tokens, int64_t half, float *out) {
  const int64_t halves = (tokens + half - 1) / half;
  const int whole = p->lines == KT_SLAB_BLOCK;
  int64_t i = 0;
  KT_AMX_LOAD(6, whole ? p->slab : tiles[0], KT_SLAB_LINE);
  KT_AMX_LOAD(7, whole ? p->slab + p->apart : tiles[1], KT_SLAB_LINE);
  begin_half(0, rows, stride);
  for (; i + 2 < halves; i += 2) {
    begin_half(1, rows + half_at(i + 1, half, tokens) * stride, stride);
    end_half(0, out + i * half * KT_STRIP);
    begin_half(0, rows + half_at(i + 2, half, tokens) * stride, stride);
    end_half(1, out + half_at(i + 1, half, tokens) * KT_STRIP);
  }
  if (i + 1 < halves) begin_half(1, rows + half_at(i + 1, half, tokens) * stride, stride);
  end_half(0, out + half_at(i, half, tokens) * KT_STRIP);
  if (i + 1 < halves) end_half(1, out + half_at(i + 1, half, tokens) * KT_STRIP);
}

static void in_a_row(const kt_slabs_at *p, const uint8_t tiles[2][TILE], const uint8_t *rows,
                     int64_t stride, int64_t tokens, int64_t half, float *out) {
  const int64_t halves = (tokens + half - 1) / half;
  for (int64_t i = 0; i < halves; i += 2) {
    const int64_t at[2] = {half_at(i, half, tokens), half_at(i + 1, half, tokens)};
    const uint8_t *const x[2] = {rows + at[0] * stride, rows + at[1] * stride};
    void *const to[2] = {out + at[0] * KT_STRIP, out + at[1] * KT_STRIP};
    if (i + 1 < halves)
      multiply_halves(1, p, tiles, x, stride, to);
    else
      multiply_halves(0, p, tiles, x, stride, to);
  }
}

/* Sums of two halves of slots that lie apart. */
typedef struct waiting {
  _Alignas(64) float sum[2 * KT_AMX_ROWS][KT_STRIP];
  const int32_t *slots;
  int64_t count;
} waiting;

static void spread(const waiting *w, int32_t first, float *out) {
  for (int64_t t = 0; t < w->count; t++) {
    float *const to = out + (int64_t)(w->slots[t] - first) * KT_STRIP;
    for (int r = 0; r < KT_STRIP; r += 16) _mm512_storeu_ps(to + r, _mm512_load_ps(w->sum[t] + r));
  }
}

/* Sums are spread while the next tokens are multiplied. */
static void one_by_one(const kt_slabs_at *p, const uint8_t tiles[2][TILE], const uint8_t *rows,
                       int64_t stride, const int32_t *slots, int64_t tokens, int32_t first,
                       int64_t half, float *out) {
  waiting turn[2];
  int now = 0;
  turn[1].count = 0;
  for (int64_t t = 0; t < tokens; t += 2 * half, now ^= 1) {
    waiting *const w = turn + now;
    const int64_t left = tokens - t;
    const uint8_t *const x[2] = {rows + t * stride, rows + (t + half) * stride};
    void *const to[2] = {w->sum[0], w->sum[half]};
    w->slots = slots + t, w->count = left < 2 * half ? left : 2 * half;
    if (left > half)
      multiply_halves(1, p, tiles, x, stride, to);
    else
      multiply_halves(0, p, tiles, x, stride, to);
    spread(turn + (now ^ 1), first, out);
  }
  spread(turn + (now ^ 1), first, out);
}

/* Halves have as many rows as those of the stream: it does not configure tiles again. */
static void strip(const kt_slabs_at *p, const uint8_t *rows, int64_t stride, const int32_t *slots,
                  int64_t tokens, int32_t first, kt_beside *beside, float *out) {
  _Alignas(64) uint8_t tiles[2][TILE];
  const kt_halves usual = {.rows = KT_AMX_ROWS};
  if (beside->line != KT_AMX_LINE) kt_amx_prepare(beside, &usual, KT_AMX_LINE);
  for (int64_t i = 0; i < 2 * p->apart; i += KT_SLAB_LINE)
    kt_beside_touch(p->slab + 2 * p->apart + i);
  last_block(p, tiles);
  if (tokens >= beside->rows && slots[tokens - 1] - slots[0] == tokens - 1)
    (p->lines > KT_SLAB_BLOCK ? in_a_row : small_in_a_row)(
        p, tiles, rows, stride, tokens, beside->rows, out + (slots[0] - first) * KT_STRIP);
  else
    one_by_one(p, tiles, rows, stride, slots, tokens, first, beside->rows, out);
}

const kt_slab_math kt_slab_math_amx = {.rows = kt_slabs_avx512, .pair = pair, .strip = strip};

KT_TARGET_END
#endif
