/* slabs.h - matrices of adapters, and their products.
 *
 * A matrix [rows, cols] is cut into slabs of 16 rows. A slab is a line of 64 bytes for each two
 * columns: those two of each row, row after row, in bf16. What is missing of the last slab and of
 * an odd last column is zeros. So any columns of a slab, and any slabs of a matrix, lie together,
 * and a rank of 16 has nothing but numbers. 16 lines are the second operand of TDPBF16PS.
 *
 * All numbers that are multiplied are bf16. A product of a row is what that instruction computes,
 * on every level: s begins as 0, and for each 32 columns, the last of which may be fewer,
 *   even, odd = sums of the products of even and of odd columns, one fma each, from 0 on
 *   s = s + (even + odd)
 * where numbers below 2^-126 count as 0 (kt_float_mode_flush). So its bits are the same on every
 * level, and do not depend on other rows or slabs. */
#ifndef KT_SLABS_H
#define KT_SLABS_H

#include "../moe/beside.h"

enum {
  KT_SLAB_ROWS = 16,
  KT_SLAB_LINE = 64,
  KT_SLAB_BLOCK = 16,  /* lines that are summed together */
  KT_SLAB_COLS = 32,   /* their columns */
  KT_SLAB_TOKENS = 128 /* of one call */
};

/* Slabs of so many rows; lines of so many columns. */
static inline int64_t kt_slabs(int64_t rows) { return (rows + KT_SLAB_ROWS - 1) / KT_SLAB_ROWS; }
static inline int64_t kt_slab_lines(int64_t cols) { return (cols + 1) / 2; }

/* `count` slabs, each `lines` of 64 bytes; a slab `apart` bytes after the other. */
typedef struct kt_slabs_at {
  const uint8_t *slab;
  int64_t count, lines, apart;
} kt_slabs_at;

/* The product of row i, of 2 * lines floats, with slab p goes to 16 floats at
 * out[i] + p / 2 * step + p % 2 * 16, i < tokens <= KT_SLAB_TOKENS. */
typedef void kt_slabs_fn(const kt_slabs_at *slabs, const float *const *rows, int64_t tokens,
                         float *const *out, int64_t step);

/* sums[i][p] = the product of row i, of bf16, with slab p, of which the second may be NULL.
 * lines % 16 == 0. */
typedef void kt_slab_pair_fn(const uint8_t *const slab[2], int64_t lines,
                             const uint16_t *const *rows, int64_t tokens,
                             float (*sums)[2][KT_SLAB_ROWS]);

/* The products of `tokens` rows of bf16, `stride` bytes apart, with the two slabs of a strip go to
 * the 32 floats at out + (slots[i] - first) * 32; slots ascend. Rows have zeros up to 32 columns;
 * the memory of 16 further rows is read. Behind a streamed product, whose tiles it takes. */
typedef void kt_slab_strip_fn(const kt_slabs_at *slabs, const uint8_t *rows, int64_t stride,
                              const int32_t *slots, int64_t tokens, int32_t first,
                              kt_beside *beside, float *out);

typedef struct kt_slab_math {
  kt_slabs_fn *rows;
  kt_slab_pair_fn *pair; /* NULL: none, nor the other */
  kt_slab_strip_fn *strip;
} kt_slab_math;
extern const kt_slab_math kt_slab_math_scalar, kt_slab_math_avx2, kt_slab_math_avx512,
    kt_slab_math_amx;
kt_slabs_fn kt_slabs_avx512;

/* The cell for the level in use. */
const kt_slab_math *kt_slab_math_best(void);

#endif
