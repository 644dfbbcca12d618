/* audit.h - proof of packed weights from their specification alone.
 *
 * Nothing here is shared with what packs: places follow from the byte formula of
 * docs/formats.md, source values from the definition of their number formats. One loop, one
 * file per level: the compiler makes of it what the level allows, and since sums have lanes
 * of their own the results have the same bits everywhere. */
#ifndef KT_AUDIT_H
#define KT_AUDIT_H

#include "ktconv.h"

enum {
  KT_AUDIT_ROWS = 16, /* rows of half a tile */
  KT_AUDIT_COLS = 64, /* columns that its 1024 bytes hold, once (INT8) or twice (INT4) */
  KT_AUDIT_HALF = KT_AUDIT_ROWS * KT_AUDIT_COLS
};

/* A layout as docs/formats.md defines it, independent of the packers: tiles of 32 rows x
 * planes * 64 columns, in row blocks of `row_block`; a code is a byte, or (2 planes) a nibble. */
typedef struct kt_audit_format {
  int32_t planes;
  int64_t row_block;
  float units; /* a step between codes is so many scales */
  float (*rule)(float amax);
} kt_audit_format;

/* One pass over rows `first` .. first + m->rows of a packed matrix [rows, m->cols]. */
typedef struct kt_audit_job {
  const kt_audit_format *format;
  const kt_matrix *source;
  int64_t rows, first;
  const uint8_t *packed;
  const float *scale;
  float *error, *amax, *rule; /* of the rows compared */
} kt_audit_job;

typedef void kt_audit_fn(const kt_audit_job *job, kt_audit *audit);
kt_audit_fn kt_audit_scalar, kt_audit_avx2, kt_audit_avx512;

void kt_audit_codes_scalar(const kt_audit_format *format, const uint8_t *packed, int64_t rows,
                           int64_t cols, int8_t *codes);

#endif
