/* packed.h - what a packed format consists of: one row of the table in packed.c. */
#ifndef KT_PACKED_H
#define KT_PACKED_H

#include "common/matrix.h"
#include "ktconv.h"

/* All arguments were checked. Quantizers return KT_OK, or KT_ERR_NONFINITE without a
 * position; measure adds to an error that was cleared. */
typedef kt_status kt_quantize_fn(const kt_matrix *matrix, int8_t *codes, float *scale,
                                 float *scratch);
typedef void kt_pack_fn(const int8_t *codes, int64_t rows, int64_t cols, uint8_t *packed);
typedef void kt_unpack_fn(const uint8_t *packed, int64_t rows, int64_t cols, int8_t *codes);
typedef kt_status kt_quantize_pack_fn(const kt_matrix *matrix, uint8_t *packed, float *scale,
                                      float *scratch);
typedef void kt_measure_rows_fn(const kt_matrix *matrix, int64_t row, int64_t count,
                                const uint8_t *packed, const float *scale, float *scratch,
                                kt_error *error);
typedef void kt_measure_fn(const kt_matrix *matrix, const uint8_t *packed, const float *scale,
                           float *scratch, kt_error *error);

enum { KT_ISA_COUNT = KT_ISA_AMX + 1 };

/* By level; a level without a cell uses the one below, the scalar one is always there. */
typedef struct kt_packer {
  int64_t rows_step, cols_step, codes_per_byte;
  kt_quantize_fn *quantize;
  kt_pack_fn *pack;
  kt_unpack_fn *unpack;
  kt_quantize_pack_fn *quantize_pack[KT_ISA_COUNT];
  kt_measure_fn *measure[KT_ISA_COUNT];
} kt_packer;

extern const kt_packer kt_int8_packer, kt_int4_packer;

#endif
