/* transposed.h - products of activations with columns of packed weights, in one pass.
 *
 *   out[t][c] = sum over n of rows[t][n] * w[n][column + c], c < 32
 *
 * n goes over the rows of one matrix, or of two of the same sizes one after the other. Where a
 * strip of the transpose (strips.h) is made first and multiplied then, here a chunk of it is
 * decoded into the first cache while the chunk before is multiplied.
 *
 * Activations are bf16 rows [n], or split rows: int8 high[n], int8 low[n], float scale, with
 *   value = scale * (256 * high + low)
 * which integer codes are multiplied with exactly (kt_split_row_fn in strips.h makes them). */
#ifndef KT_TRANSPOSED_H
#define KT_TRANSPOSED_H

#include "../gemm/bf16_gemm.h"

enum {
  KT_TRANSPOSED_STEPS = 8,                                  /* of a chunk, at most */
  KT_TRANSPOSED_CHUNK = KT_TRANSPOSED_STEPS * KT_BF16_TILE, /* bytes */
  KT_TRANSPOSED_TOKENS = 192,                               /* of one product, at most */
  KT_TRANSPOSED_SUM = 2048, /* rows of w that are summed at a time: activations stay in L2 */
  KT_TRANSPOSED_ROWS = KT_TRANSPOSED_TOKENS + 16 /* of its sums */
};

/* Where 32 columns of 32 rows of a matrix are: the meaning is the format's. */
typedef struct kt_packed_square {
  const uint8_t *codes;
  const void *scale; /* of the first of the rows */
  int64_t shift;
} kt_packed_square;

/* One product, strip after strip. A cell (kt_transposed_fn) computes the next strip: out
 * [tokens][32], 64-byte aligned, with room for KT_TRANSPOSED_ROWS rows. Scales of groups are
 * applied, those of rows must be in the activations. An element's bits follow from its row and its
 * column of w alone. */
struct kt_transposed {
  kt_weight w[2];
  int64_t matrices;    /* of w */
  int64_t from, to;    /* rows of w that are summed, of all matrices; % 64 == 0, or the last */
  int adds;            /* the sums are added to out */
  int64_t column, end; /* the next strip's first column, and behind the last strip; % 32 == 0 */
  const uint8_t *rows; /* 64-byte aligned, `stride` bytes apart, % 64 == 0 */
  int64_t stride, tokens;
  /* Memory, 64-byte aligned: 2 KT_TRANSPOSED_CHUNK bytes, KT_TRANSPOSED_ROWS rows of 64 numbers,
   * and two squares for each 32 rows. */
  uint8_t *ring;
  void *sums;
  kt_packed_square *squares;
  int started, chunk; /* begun with zeros */
};

/* The cell of a format, where the level in use is amx and there is one; else NULL. */
kt_transposed_fn *kt_format_transposed(const kt_weight_format *format);

/* Where a split row of n numbers has its scale. */
static inline float *kt_split_scale(uint8_t *row, int64_t n) {
  return (float *)(void *)(row + 2 * n);
}

#endif
