/* packed_values.h - values of rows in scratch, which searches read several times. */
#ifndef KT_AUDIT_PACKED_VALUES_H
#define KT_AUDIT_PACKED_VALUES_H

#include "packed.h"
#include "source.h"

/* From one row of scratch to the next. */
INLINE int64_t scratch_pitch(const kt_matrix *m) { return m->cols + 16; }

/* Those of the rth row. */
INLINE float *values_at(const kt_audit_job *job, int64_t r) {
  return job->scratch + r * scratch_pitch(job->source);
}

/* Those of KT_AUDIT_ROWS rows from `row` on. */
INLINE void load_values(const kt_audit_job *job, int64_t row) {
  const kt_matrix *const m = job->source;
  const int64_t block = is_across(m) ? KT_AUDIT_GATHERED : KT_AUDIT_BLOCK;
  const int64_t in_strip = is_across(m) ? row % (2 * KT_AUDIT_ROWS) : 0;
  for (int64_t col = 0, width; col < m->cols; col += width) {
    uint8_t room[ROOM_BYTES];
    width = least(block, m->cols - col);
    const stored from = stored_from(m, row - in_strip, col, width, room);
    for (int64_t r = 0; r < KT_AUDIT_ROWS; r++)
      source_values(m, stored_on(from, in_strip + r), row + r, col, width, values_at(job, r) + col);
  }
}

#endif
