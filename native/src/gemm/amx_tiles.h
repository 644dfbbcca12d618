/* amx_tiles.h - how all AMX code divides the eight tiles, and tokens. Include after
 * KT_TARGET_BEGIN(AMX).
 *
 *   0 1     sums: tile 2i + j holds 16 tokens (i) x 16 rows of w (j), 32-bit
 *   2 3
 *   4 5     activations: 16 tokens x 64 bytes of columns
 *   6 7     weights: a half tile, 16 groups of 4 bytes x 16 rows of w
 *
 * Four products per two loads of activations and two of weights: one load per product.
 * Configuring costs as much as many products, so it is done once for all strips of as many tokens,
 * never inside of loops (amx_stream.h).
 *
 * For that, tokens are cut into halves of as many rows, up to 16, and two halves x 32 rows of w are
 * summed in four tiles; of an odd number the last one is alone, with two. Where tokens do not
 * divide evenly, the last half begins in the one before: 33 tokens are the halves 0..10, 11..21,
 * 22..32, and 35 are 0..11, 12..23, 23..34.
 *
 * A product of tiles costs the same for 1 token as for 16, and weights must be unpacked for it:
 * each format leaves fewer than its least_tokens to AVX-512, measured with an expert's weights
 * outside of the caches (benchmarks/RESULTS.md, AMX). */
#ifndef KT_AMX_TILES_H
#define KT_AMX_TILES_H

#include <stdint.h>

enum { KT_AMX_ROWS = 16, KT_AMX_LINE = 64 };

/* Tiles for rows0 (1..16) and rows1 (0..16) tokens; of 0, tiles 2, 3 and 5 are not to be used.
 * line: bytes of columns (a multiple of 4 up to 64); weights have line / 4 groups. */
KT_INLINE void kt_amx_configure_lines(int rows0, int rows1, int line) {
  static const uint8_t block[8] = {0, 0, 1, 1, 0, 1, 2, 2}; /* whose tokens; 2: weights */
  _Alignas(64) uint8_t config[64] = {1};                    /* palette 1 */
  const int rows[3] = {rows0, rows1, line / 4};
  for (int tile = 0; tile < 8; tile++) {
    const int bytes = tile == 4 || tile == 5 ? line : KT_AMX_LINE; /* per row */
    config[48 + tile] = (uint8_t)rows[block[tile]];
    config[16 + 2 * tile] = config[48 + tile] ? (uint8_t)bytes : 0;
  }
  /* GCC's intrinsic says that it reads 8 bytes of config: without this the rest may go missing. */
  __asm__ volatile("" ::"m"(config));
  _tile_loadconfig(config);
}

/* Tiles for `tokens` (1..32) tokens, 16 of them in tile 4. */
KT_INLINE void kt_amx_configure(int tokens) {
  const int more = tokens - KT_AMX_ROWS;
  kt_amx_configure_lines(more > 0 ? KT_AMX_ROWS : tokens, more > 0 ? more : 0, KT_AMX_LINE);
}

typedef struct kt_halves {
  int64_t count, rows, tokens;
} kt_halves;

static inline kt_halves kt_halves_of(int64_t tokens) {
  const int64_t count = (tokens + KT_AMX_ROWS - 1) / KT_AMX_ROWS;
  return (kt_halves){count, (tokens + count - 1) / count, tokens};
}

/* Its first token. */
static inline int64_t kt_half_start(const kt_halves *h, int64_t half) {
  return half < h->count - 1 ? half * h->rows : h->tokens - h->rows;
}

/* The first that no half before it has. */
static inline int64_t kt_half_new(const kt_halves *h, int64_t half) { return half * h->rows; }

/* For all halves, with `line` bytes of columns. */
KT_INLINE void kt_amx_configure_halves(const kt_halves *h, int line) {
  kt_amx_configure_lines((int)h->rows, (int)h->rows, line);
}

/* Instructions in the order in which they are written; GCC 12's intrinsics do not say that they
 * read or write memory. Tiles are constants. PASSING: of what is not wanted again soon, and is not
 * to take the place of other lines in L1. */
#define KT_AMX_LOAD_BY(instruction, tile, from, stride)                                            \
  __asm__ volatile(instruction " (%0,%1,1), %%tmm" #tile::"r"((const void *)(from)),               \
                   "r"((int64_t)(stride))                                                          \
                   : "memory")
#define KT_AMX_LOAD(tile, from, stride) KT_AMX_LOAD_BY("tileloadd", tile, from, stride)
#define KT_AMX_LOAD_PASSING(tile, from, stride) KT_AMX_LOAD_BY("tileloaddt1", tile, from, stride)
#define KT_AMX_STORE(tile, to, stride)                                                             \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"((void *)(to)),                     \
                   "r"((int64_t)(stride))                                                          \
                   : "memory")
#define KT_AMX_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define KT_AMX_PRODUCT(int8, sum, x, w)                                                            \
  do {                                                                                             \
    if (int8)                                                                                      \
      __asm__ volatile("tdpbssd %%tmm" #w ", %%tmm" #x ", %%tmm" #sum::);                          \
    else                                                                                           \
      __asm__ volatile("tdpbf16ps %%tmm" #w ", %%tmm" #x ", %%tmm" #sum::);                        \
  } while (0)

/* `both`, a constant: whether tiles 2, 3 and 5 are used. What was written to memory before is seen
 * by the loads that follow: GCC 12's _tile_loadd does not say that it reads memory. */
KT_INLINE void kt_amx_zero_sums(const int both) {
  __asm__ volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

/* Adds the products of one step of columns: half tiles w[2], activations x[i][t] of tokens `stride`
 * bytes apart. int8: or bf16, a constant. */
KT_INLINE void kt_amx_multiply(const int int8, const int both, const uint8_t *const w[2],
                               const uint8_t *const x[2], int64_t stride) {
  KT_AMX_LOAD(6, w[0], KT_AMX_LINE);
  KT_AMX_LOAD(7, w[1], KT_AMX_LINE);
  KT_AMX_LOAD(4, x[0], stride);
  KT_AMX_PRODUCT(int8, 0, 4, 6);
  KT_AMX_PRODUCT(int8, 1, 4, 7);
  if (!both) return;
  KT_AMX_LOAD(5, x[1], stride);
  KT_AMX_PRODUCT(int8, 2, 5, 6);
  KT_AMX_PRODUCT(int8, 3, 5, 7);
}

/* To sums[i][t][32 rows] of 32 bits. */
KT_INLINE void kt_amx_store_sums(const int both, void *const sums[2]) {
  enum { LINE = 2 * KT_AMX_LINE }; /* 32 rows */
  _tile_stored(0, sums[0], LINE);
  _tile_stored(1, (uint8_t *)sums[0] + KT_AMX_LINE, LINE);
  if (both) {
    _tile_stored(2, sums[1], LINE);
    _tile_stored(3, (uint8_t *)sums[1] + KT_AMX_LINE, LINE);
  }
}

#endif
