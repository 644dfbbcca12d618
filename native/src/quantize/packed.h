/* packed.h - what a packed format consists of: one row of the table in packed.c. */
#ifndef KT_PACKED_H
#define KT_PACKED_H

#include "../cpu.h"
#include "../source/decode.h"
#include "ktconv.h"

typedef struct kt_packer kt_packer;

/* All arguments were checked. KT_OK, or KT_ERR_NONFINITE without a position. */
typedef kt_status kt_quantize_pack_fn(const kt_packer *packer, const kt_matrix *matrix,
                                      uint8_t *packed, float *scale, float *scratch);

/* The rules of a format for one row are its scalar truth, the cells what a level does
 * better for a whole matrix. */
struct kt_packer {
  int64_t rows_step, cols_step, codes_per_byte;
  float (*scale)(float amax); /* of a row, from its largest magnitude */
  void (*requantize_to_int4)(int8_t *codes,
                             int64_t cols); /* second rounding, NULL if there is none */
  void (*pack_row)(const int8_t *codes, int64_t rows, int64_t cols, int64_t n, uint8_t *packed);
  void (*unpack_row)(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n, int8_t *codes);
  kt_quantize_pack_fn *quantize_pack[KT_LEVELS];
};

extern const kt_packer kt_int8_packer, kt_int4_packer;

/* Whole matrices, one row at a time. */
kt_status kt_quantize_rows(const kt_packer *packer, const kt_matrix *m, int8_t *codes, float *scale,
                           float *scratch);
kt_quantize_pack_fn kt_quantize_pack_rows; /* the scalar cell of every packer */

#endif
