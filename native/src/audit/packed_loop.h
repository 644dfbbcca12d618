/* packed_loop.h - the pass, included by one file per level. See packed.h. */
#ifndef KT_AUDIT_PACKED_LOOP_H
#define KT_AUDIT_PACKED_LOOP_H

#include "packed.h"
#include "packed_fixed.h"
#include "packed_search.h"
#include "packed_sums.h"
#include "source.h"

#include <math.h>
#include <string.h>

/* ---- Where codes are: SPEC 4.2 and 8.4 of docs/formats.md ----------------- */

/* Byte of element (row, col), both multiples of 16 rows and of a tile's columns. */
INLINE int64_t half_tile_at(const kt_audit_format *format, int64_t rows, int64_t cols, int64_t row,
                            int64_t col) {
  const int64_t row_block = format->row_block, col_block = 3584;
  const int64_t nb = row / row_block * row_block, ns = least(row_block, rows - nb);
  const int64_t kb = col / col_block * col_block, ks = least(col_block, cols - kb);
  const int64_t strip = (row - nb) / 32 * 32, half = (row - nb) % 32 / 16;
  const int64_t elements = nb * cols + kb * ns + strip * ks + (col - kb) * 32;
  return elements / format->planes + half * KT_AUDIT_ROWS * KT_AUDIT_COLS;
}

/* Byte of the 32 x 32 elements of GINT4 or GINT8 from (row, col) on. */
INLINE int64_t group_tile_at(const kt_audit_format *format, int64_t cols, int64_t row,
                             int64_t col) {
  return (row / 32 * (cols / 32) + col / 32) * 1024 / format->planes;
}

/* 64 bytes are 4 columns of the 16 rows, one row after the other. Here and below, what is of a
 * row is `pitch` bytes behind that of the row before. */
INLINE void bytes_by_row(const uint8_t *tile, const int cols, uint8_t *bytes, const int64_t pitch) {
  for (int g = 0; g < cols / 4; g++)
    for (int r = 0; r < KT_AUDIT_ROWS; r++)
      memcpy(bytes + r * pitch + 4 * g, tile + 64 * g + 4 * r, 4);
}

/* Low (0) or high (1) nibbles as numbers -8..7; sign: 8 if they are two's complement, 0 if they
 * are the number plus 8. */
INLINE void nibbles(uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS], const int high, const int sign,
                    const int cols, int8_t *codes, const int64_t pitch) {
  for (int r = 0; r < KT_AUDIT_ROWS; r++)
    for (int c = 0; c < cols; c++) {
      const int nibble = (bytes[r][c] >> (high ? 4 : 0)) & 15;
      codes[r * pitch + c] = (int8_t)((nibble ^ sign) - 8);
    }
}

/* The codes of half a tile of INT8 or INT4: 16 rows. */
INLINE void half_tile_codes(const kt_audit_format *format, const uint8_t *tile, int8_t *codes,
                            const int64_t pitch) {
  uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  if (format->planes == 1) {
    bytes_by_row(tile, KT_AUDIT_COLS, (uint8_t *)codes, pitch);
    return;
  }
  bytes_by_row(tile, KT_AUDIT_COLS, bytes[0], KT_AUDIT_COLS);
  nibbles(bytes, 0, 8, KT_AUDIT_COLS, codes, pitch);
  nibbles(bytes, 1, 8, KT_AUDIT_COLS, codes + KT_AUDIT_COLS, pitch);
}

/* Those of a tile of GINT8: of each 128 bytes the first 64 are 16 rows, the others 16 more. */
INLINE void byte_tile_codes(const uint8_t *tile, int8_t *codes, const int64_t pitch) {
  for (int r = 0; r < 2 * KT_AUDIT_ROWS; r++)
    for (int c = 0; c < KT_AUDIT_GROUP_COLS; c++)
      codes[r * pitch + c] = (int8_t)(tile[c / 4 * 128 + r * 4 + c % 4] - 128);
}

/* Those of a tile of GINT4: the low nibbles are 16 rows, the high ones 16 more. */
INLINE void group_tile_codes(const kt_audit_format *format, const uint8_t *tile, int8_t *codes,
                             const int64_t pitch) {
  uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  if (format->planes == 1) {
    byte_tile_codes(tile, codes, pitch);
    return;
  }
  bytes_by_row(tile, KT_AUDIT_GROUP_COLS, bytes[0], KT_AUDIT_COLS);
  nibbles(bytes, 0, 0, KT_AUDIT_GROUP_COLS, codes, pitch);
  nibbles(bytes, 1, 0, KT_AUDIT_GROUP_COLS, codes + KT_AUDIT_ROWS * pitch, pitch);
}

/* The code of one element. */
static int code_at(const kt_audit_format *format, const uint8_t *packed, int64_t rows, int64_t cols,
                   int64_t row, int64_t col) {
  const int64_t half_row = row % KT_AUDIT_ROWS, in_tile = col % kt_audit_tile_cols(format);
  const int64_t byte = in_tile % KT_AUDIT_COLS / 4 * 64 + half_row * 4 + col % 4;
  if (!format->row_block) {
    const uint8_t *const tile = packed + group_tile_at(format, cols, row, col);
    if (format->planes == 1) return tile[col % 32 / 4 * 128 + row % 32 * 4 + col % 4] - 128;
    return (tile[byte] >> (row % 32 < 16 ? 0 : 4) & 15) - 8;
  }
  const uint8_t found =
      packed[half_tile_at(format, rows, cols, row - half_row, col - in_tile) + byte];
  const int nibble = found >> (in_tile < KT_AUDIT_COLS ? 0 : 4) & 15;
  return format->planes == 2 ? (nibble ^ 8) - 8 : (int8_t)found;
}

/* ---- Scales ------------------------------------------------------------------ */

/* That of a group of columns of a row of those compared. */
INLINE float scale_at(const kt_audit_job *job, int64_t row, int64_t group) {
  const int64_t n = job->first + row;
  const int64_t at = (n / 32 * job->groups + group) * 32 + n % 32;
  if (job->bf16_scales) return from_bits((uint32_t)((const uint16_t *)job->scale)[at] << 16);
  return ((const float *)job->scale)[at];
}

/* ---- Comparing --------------------------------------------------------------- */

/* Of one lane: 4 of 64 columns, or 2 of 32. */
INLINE float square_sum(const float *x, const int cols) {
  const float sum = x[0] * x[0] + x[LANES] * x[LANES];
  if (cols == 2 * LANES) return sum;
  return sum + (x[2 * LANES] * x[2 * LANES] + x[3 * LANES] * x[3 * LANES]);
}

INLINE float most_of(const float *x, const int cols) {
  const float most = larger(fabsf(x[0]), fabsf(x[LANES]));
  if (cols == 2 * LANES) return most;
  return larger(most, larger(fabsf(x[2 * LANES]), fabsf(x[3 * LANES])));
}

/* How many of a block's codes are this one; in bytes, which a block does not fill. */
INLINE int64_t count_of(const int8_t *codes, int8_t code, const int cols, int64_t runs) {
  uint8_t each[KT_AUDIT_COLS] = {0};
  for (int64_t run = 0; run < runs; run++)
    for (int c = 0; c < cols; c++) each[c] = (uint8_t)(each[c] + (codes[run * cols + c] == code));
  int32_t sum = 0;
  for (int c = 0; c < cols; c++) sum += each[c];
  return sum;
}

/* The sum of a row's squared codes of a block. */
INLINE int32_t squares_of(const int8_t *codes, int64_t count) {
  int16_t wide[KT_AUDIT_BLOCK]; /* of which a machine multiplies and adds two at once */
  int32_t sum = 0;
  for (int64_t c = 0; c < count; c++) wide[c] = codes[c];
  for (int64_t c = 0; c < count; c++) sum += wide[c] * wide[c];
  return sum;
}

/* A weight as far as levels reach. NaN stays NaN. */
INLINE float within(float w, float limit) {
  const float most = limit < w ? limit : w;
  return -limit > most ? -limit : most;
}

/* Adds `runs` times 64 columns of a row, or 32. The only code that can be beyond the levels is
 * `invalid`, unless it is 0: then none can. With `cut`, levels reach up to `limit`. */
INLINE void compare_runs(const float *w, const int8_t *codes, float step, float limit,
                         const int cut, const int8_t invalid, const int cols, int64_t runs,
                         row_state *row) {
  group_state *const group = &row->group;
  double source[LANES], error[LANES];
  float most_source[LANES], most_error[LANES];
  memcpy(source, row->source, sizeof source);
  memcpy(error, row->error, sizeof error);
  memcpy(most_source, group->most_source, sizeof most_source);
  memcpy(most_error, group->most_error, sizeof most_error);
  for (int64_t run = 0; run < runs; run++) {
    const float *const x = w + run * cols;
    float e[KT_AUDIT_COLS], near[KT_AUDIT_COLS];
    for (int c = 0; c < cols; c++) {
      const float value = (float)codes[run * cols + c] * step;
      e[c] = x[c] - value;
      if (cut) near[c] = within(x[c], limit) - value;
    }
    for (int i = 0; i < LANES; i++) source[i] += (double)square_sum(x + i, cols);
    for (int i = 0; i < LANES; i++) error[i] += (double)square_sum(e + i, cols);
    for (int i = 0; i < LANES; i++) most_source[i] = larger(most_of(x + i, cols), most_source[i]);
    const float *const off = cut ? near : e;
    for (int i = 0; i < LANES; i++) most_error[i] = larger(most_of(off + i, cols), most_error[i]);
  }
  memcpy(row->source, source, sizeof source);
  memcpy(row->error, error, sizeof error);
  memcpy(group->most_source, most_source, sizeof most_source);
  memcpy(group->most_error, most_error, sizeof most_error);
  group->squares += squares_of(codes, runs * cols);
  group->zeros += count_of(codes, 0, cols, runs);
  if (invalid) group->invalid += count_of(codes, invalid, cols, runs);
}

/* `width` columns of a row. A level may have a quicker loop with the same bits of sums, which
 * returns 0 where it cannot. */
#ifdef KT_AUDIT_QUICK_RUNS
static __attribute__((noinline)) void compare_any(const float *w, const int8_t *codes, float step,
                                                  float limit, int cut, int8_t invalid, int cols,
                                                  int64_t runs, row_state *row) {
  compare_runs(w, codes, step, limit, cut, invalid, cols, runs, row);
}

INLINE void compare_row(const float *w, const int8_t *codes, float step, float limit, const int cut,
                        const int8_t invalid, const int cols, int64_t width, row_state *row) {
  if (!quick_runs(w, codes, step, limit, cut, invalid, cols, width / cols, row))
    compare_any(w, codes, step, limit, cut, invalid, cols, width / cols, row);
}
#else
INLINE void compare_row(const float *w, const int8_t *codes, float step, float limit, const int cut,
                        const int8_t invalid, const int cols, int64_t width, row_state *row) {
  compare_runs(w, codes, step, limit, cut, invalid, cols, width / cols, row);
}
#endif

/* The sums of a row once more, where binary32 squares overflow or vanish. */
static void sum_extreme_row(const kt_audit_job *job, int64_t row, row_state *state) {
  const kt_matrix *const m = job->source;
  const int64_t cols = KT_AUDIT_GROUP_COLS, in_strip = row % (2 * KT_AUDIT_ROWS);
  memset(state->source, 0, sizeof state->source);
  memset(state->error, 0, sizeof state->error);
  for (int64_t col = 0; col < m->cols; col += cols) {
    uint8_t room[ROOM_BYTES];
    float values[KT_AUDIT_GROUP_COLS];
    const stored strip = stored_from(m, row - in_strip, col, cols, room);
    source_values(m, stored_on(strip, in_strip), row, col, cols, values);
    for (int64_t c = 0; c < cols; c++) {
      const int code =
          code_at(job->format, job->packed, job->rows, m->cols, job->first + row, col + c);
      const float step = job->format->units * scale_at(job, row, (col + c) / job->group);
      const double w = (double)values[c], v = (double)((float)code * step);
      state->source[0] += w * w;
      state->error[0] += (w - v) * (w - v);
    }
  }
}

static double total(const double *lane) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += lane[i];
  return sum;
}

/* Of numbers that are 0 or more, whose order does not matter: in halves, which are vectors. */
static float largest(const float *lane) {
  float most[LANES / 2];
  for (int i = 0; i < LANES / 2; i++) most[i] = larger(lane[i], lane[i + LANES / 2]);
  for (int i = 0; i < LANES / 4; i++) most[i] = larger(most[i], most[i + LANES / 4]);
  for (int i = 0; i < LANES / 8; i++) most[i] = larger(most[i], most[i + LANES / 8]);
  return larger(most[0], most[1]);
}

/* A row's results for one group; the next one begins. */
static void finish_group(const kt_audit_job *job, int64_t row, int64_t group, group_state *found,
                         kt_audit *audit) {
  const int64_t at = row * job->groups + group;
  const float amax = largest(found->most_source), rule = job->format->rule(amax);
  job->amax[at] = amax;
  job->rule[at] = job->bf16_scales ? to_bf16(rule) : rule;
  job->error[at] = largest(found->most_error);
  const double scale = (double)scale_at(job, row, group);
  const double step = (double)job->format->units * scale, steps = (double)job->error[at] / step;
  if (scale > 0 && steps > audit->max_steps) audit->max_steps = steps;
  audit->squared_value += step * step * (double)found->squares;
  audit->zeros += found->zeros;
  audit->invalid += scale == 0 ? job->group - found->zeros : found->invalid;
  memset(found, 0, sizeof *found);
}

static void finish_row(const kt_audit_job *job, int64_t row, row_state *state, kt_audit *audit) {
  float amax = 0;
  for (int64_t g = 0; g < job->groups; g++) amax = larger(job->amax[row * job->groups + g], amax);
  if (amax < 0x1p-40f || amax > 0x1p40f) sum_extreme_row(job, row, state);
  const double source = total(state->source), error = total(state->error);
  audit->squared_source += source;
  audit->squared_error += error;
  if (job->squared) job->squared[row] = error, job->squared[job->source->rows + row] = source;
}

/* `width` columns of the rows compared at once: unpacked, then row after row. keep: their values,
 * in scratch. */
INLINE void compare_block(const kt_audit_job *job, stored s, int64_t row, int64_t at_once,
                          int64_t col, int64_t width, const int grouped, const int cut,
                          const float *step, int keep, row_state *state) {
  const int64_t run_bytes = units_in(width, s.unit.cols) * s.unit.bytes;
  int8_t codes[2 * KT_AUDIT_ROWS][KT_AUDIT_BLOCK];
  const kt_audit_format *const format = job->format;
  const int64_t rows = job->rows, cols = job->source->cols, first = job->first + row;
  for (int64_t c = 0; c < width; c += kt_audit_tile_cols(format))
    if (grouped)
      group_tile_codes(format, job->packed + group_tile_at(format, cols, first, col + c),
                       codes[0] + c, KT_AUDIT_BLOCK);
    else
      for (int64_t half = 0; half < at_once; half += KT_AUDIT_ROWS) {
        const uint8_t *const tile =
            job->packed + half_tile_at(format, rows, cols, first + half, col + c);
        prefetch(tile + 2 * KT_AUDIT_BLOCK * KT_AUDIT_ROWS / format->planes,
                 KT_AUDIT_ROWS * KT_AUDIT_COLS);
        half_tile_codes(format, tile, codes[half] + c, KT_AUDIT_BLOCK);
      }
  for (int64_t r = 0; r < at_once; r++) {
    float once[KT_AUDIT_BLOCK];
    float *const w = keep ? values_at(job, r) + col : once;
    const stored from = stored_on(s, r);
    prefetch(from.data + run_bytes, run_bytes);
    source_values(job->source, from, row + r, col, width, w);
    const float limit = cut && step[r] > 0 ? format->top * step[r] : INFINITY;
    if (grouped)
      compare_row(w, codes[r], step[r], limit, cut, 0, KT_AUDIT_GROUP_COLS, width, state + r);
    else if (format->planes == 1)
      compare_row(w, codes[r], step[r], limit, cut, -128, KT_AUDIT_COLS, width, state + r);
    else
      compare_row(w, codes[r], step[r], limit, cut, -8, KT_AUDIT_COLS, width, state + r);
  }
}

INLINE void audit_rows(const kt_audit_job *job, const int grouped, const int cut, kt_audit *audit) {
  const kt_matrix *const m = job->source;
  const int across = is_across(m);
  const int64_t at_once = across || grouped ? 2 * KT_AUDIT_ROWS : KT_AUDIT_ROWS;
  const int64_t block = across ? KT_AUDIT_GATHERED : KT_AUDIT_BLOCK;
  const int kept = cut && at_once == KT_AUDIT_ROWS && !(job->fixed && is_plain_bf16(m));
  for (int64_t row = 0; row < m->rows; row += at_once) {
    row_state state[2 * KT_AUDIT_ROWS];
    float step[2 * KT_AUDIT_ROWS]; /* between two codes */
    uint8_t room[ROOM_BYTES];
    memset(state, 0, (size_t)at_once * sizeof state[0]);
    for (int64_t g = 0; g < job->groups; g++) {
      const int64_t end = (g + 1) * job->group;
      for (int64_t r = 0; r < at_once; r++)
        step[r] = job->format->units * scale_at(job, row + r, g);
      for (int64_t col = g * job->group, width; col < end; col += width) {
        width = least(block, end - col);
        compare_block(job, stored_from(m, row, col, width, room), row, at_once, col, width, grouped,
                      cut, step, kept, state);
      }
      for (int64_t r = 0; r < at_once; r++) finish_group(job, row + r, g, &state[r].group, audit);
    }
    for (int64_t r = 0; r < at_once; r++) finish_row(job, row + r, state + r, audit);
    for (int64_t r = 0; job->searched && r < at_once; r += KT_AUDIT_ROWS)
      (job->fixed ? search_fixed_rows : search_rows)(job, row + r, kept);
  }
}

/* Functions of their own: as one, compilers make slower code of the first. */
#define AUDIT(name, grouped, cut)                                                                  \
  static __attribute__((noinline)) void name(const kt_audit_job *job, kt_audit *audit) {           \
    audit_rows(job, grouped, cut, audit);                                                          \
  }

AUDIT(audit_tiles, 0, 0)
AUDIT(audit_searched_tiles, 0, 1)
AUDIT(audit_groups, 1, 0)
AUDIT(audit_searched_groups, 1, 1)
#undef AUDIT

static void audit_all(const kt_audit_job *job, kt_audit *audit) {
  if (job->searched)
    (job->format->row_block ? audit_searched_tiles : audit_searched_groups)(job, audit);
  else
    (job->format->row_block ? audit_tiles : audit_groups)(job, audit);
}

#endif
