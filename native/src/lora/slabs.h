/* slabs.h - matrices of adapters, and their products with few rows.
 *
 * A matrix [rows, cols] is cut into slabs of 16 rows. A slab is a line of 64 bytes for each two
 * columns: those two of each row, row after row, in bf16. What is missing of the last slab and of
 * an odd last column is zeros. So any columns of a slab, and any slabs of a matrix, lie together,
 * and a rank of 16 has nothing but numbers. */
#ifndef KT_SLABS_H
#define KT_SLABS_H

#include <stdint.h>

enum { KT_SLAB_ROWS = 16, KT_SLAB_LINE = 64, KT_SLAB_TOKENS = 32 };

/* Slabs of so many rows; lines of so many columns. */
static inline int64_t kt_slabs(int64_t rows) { return (rows + KT_SLAB_ROWS - 1) / KT_SLAB_ROWS; }
static inline int64_t kt_slab_lines(int64_t cols) { return (cols + 1) / 2; }

/* `count` slabs, each `lines` of 64 bytes; a slab `apart` bytes after the other. */
typedef struct kt_slabs_at {
  const uint8_t *slab;
  int64_t count, lines, apart;
} kt_slabs_at;

/* Adds the product of row i, of 2 * lines floats, with slab p to 16 floats at
 * out[i] + p / 2 * step + p % 2 * 16, i < tokens <= KT_SLAB_TOKENS. An element is out + s with
 *   s[j] = sum over k = j, j + 4, ... of w[r][k] * x[k], one fma each, from 0 on
 *   s = (s[0] + s[1]) + (s[2] + s[3])
 * so its bits are the same on every level, and do not depend on other rows or slabs. */
typedef void kt_slabs_fn(const kt_slabs_at *slabs, const float *const *rows, int64_t tokens,
                         float *const *out, int64_t step);
kt_slabs_fn kt_slabs_scalar, kt_slabs_avx2, kt_slabs_avx512;

/* The cell for the level in use. */
kt_slabs_fn *kt_slabs_best(void);

#endif
