/* The sums of the audit's search in fixed point for any CPU. */
#include "packed_fixed_sums.h"

enum { BLOCK = 512 }; /* columns whose sums fit 32 bits */

/* In loops of their own, over 16 bits each, of which compilers make vectors. */
static void sums_of_block(const int16_t *row, int64_t cols, int bits, uint32_t inverse,
                          integer_sums *sums) {
  const int16_t half = bits == 4 ? 511 : 63, top = bits == 4 ? 7 : 127;
  const int shift = bits == 4 ? 10 : 7;
  int16_t code[BLOCK];
  int32_t product = 0, square = 0;
  for (int64_t c = 0; c < cols; c++) {
    const int16_t y = (int16_t)((uint32_t)(uint16_t)row[c] * (uint16_t)inverse >> 16);
    const int16_t near = (int16_t)((int16_t)(y + half) >> shift);
    code[c] = near < top ? near : top;
  }
  for (int64_t c = 0; c < cols; c++) product += row[c] * code[c];
  for (int64_t c = 0; c < cols; c++) square += code[c] * code[c];
  sums->product += product;
  sums->square += square;
}

void kt_audit_sums_scalar(const integer_row *row, int bits, const int *step, int count,
                          integer_sums *sums) {
  const int64_t cols = row->cols;
  for (int i = 0; i < count; i++) {
    sums[i] = (integer_sums){0, 0};
    for (int64_t c = 0; c < cols; c += BLOCK)
      sums_of_block(row->weight + c, least(BLOCK, cols - c), bits, inverse_of(step[i], bits),
                    sums + i);
  }
}
