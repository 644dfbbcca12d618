/* packed.h - proof of packed weights from their specification alone (kt_audit_run). See audit.h. */
#ifndef KT_AUDIT_PACKED_H
#define KT_AUDIT_PACKED_H

#include "audit.h"
#include "packed_fixed_sums.h"

/* A format as docs/formats.md defines it, independent of the packers. A code is a byte, or
 * (2 planes) a nibble. Tiles of INT8 and INT4 have 32 rows x planes * 64 columns in row blocks of
 * `row_block`, those of GINT4 and GINT8 (row_block 0) 32 x 32. */
typedef struct kt_audit_format {
  int32_t planes;
  int64_t row_block;
  float units, top; /* a step between codes is so many scales; the last level of search */
  float (*rule)(float amax);
} kt_audit_format;

static inline int kt_audit_tile_cols(const kt_audit_format *format) {
  return format->row_block ? format->planes * KT_AUDIT_COLS : KT_AUDIT_GROUP_COLS;
}

/* One pass over rows `first` .. first + m->rows of a packed matrix [rows, m->cols]. */
typedef struct kt_audit_job {
  const kt_audit_format *format;
  const kt_matrix *source;
  int64_t rows, first;
  const uint8_t *packed;
  const void *scale;
  int64_t group, groups;      /* columns that share a scale: all, or a group; how many groups */
  int bf16_scales;            /* else binary32 */
  float *error, *amax, *rule; /* [rows compared][groups] */
  double *squared;            /* [2][rows compared], or NULL */
  int searched;               /* by a search */
  int fixed;                  /* by that in fixed point */
  kt_audit_sums_fn *sums;     /* of it */
  const int *steps;           /* likewise: sizes of the steps of INT4, from number -2 on */
  const float *importance;    /* of it: [cols], or NULL */
  float *scratch;             /* KT_AUDIT_ROWS rows of values, then of integers (packed_values.h) */
} kt_audit_job;

typedef void kt_audit_fn(const kt_audit_job *job, kt_audit *audit);
kt_audit_fn kt_audit_scalar, kt_audit_avx2, kt_audit_avx512;

void kt_audit_codes_scalar(const kt_audit_format *format, const uint8_t *packed, int64_t rows,
                           int64_t cols, int8_t *codes);

#endif
