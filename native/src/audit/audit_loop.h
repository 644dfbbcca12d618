/* audit_loop.h - the pass, included by one file per level. See audit.h. */
#ifndef KT_AUDIT_LOOP_H
#define KT_AUDIT_LOOP_H

#include "audit_source.h"

#include <math.h>
#include <string.h>

enum { LANES = 16 };

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

/* Byte of the 32 x 32 elements of GINT4 from (row, col) on. */
INLINE int64_t group_tile_at(int64_t cols, int64_t row, int64_t col) {
  return (row / 32 * (cols / 32) + col / 32) * 512;
}

/* 64 bytes are 4 columns of the 16 rows, one row after the other. */
INLINE void bytes_by_row(const uint8_t *tile, const int cols,
                         uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS]) {
  for (int g = 0; g < cols / 4; g++)
    for (int r = 0; r < KT_AUDIT_ROWS; r++) memcpy(&bytes[r][4 * g], tile + 64 * g + 4 * r, 4);
}

/* Low (0) or high (1) nibbles as numbers -8..7; sign: 8 if they are two's complement, 0 if they
 * are the number plus 8. */
INLINE void nibbles(uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS], int high, const int sign,
                    const int cols, int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS]) {
  for (int r = 0; r < KT_AUDIT_ROWS; r++)
    for (int c = 0; c < cols; c++) {
      const int nibble = (bytes[r][c] >> (high ? 4 : 0)) & 15;
      codes[r][c] = (int8_t)((nibble ^ sign) - 8);
    }
}

/* The code of one element. */
static int code_at(const kt_audit_format *format, const uint8_t *packed, int64_t rows, int64_t cols,
                   int64_t row, int64_t col) {
  const int64_t half_row = row % KT_AUDIT_ROWS, in_tile = col % kt_audit_tile_cols(format);
  const int64_t byte = in_tile % KT_AUDIT_COLS / 4 * 64 + half_row * 4 + col % 4;
  if (!format->row_block)
    return (packed[group_tile_at(cols, row, col) + byte] >> (row % 32 < 16 ? 0 : 4) & 15) - 8;
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

/* What is known so far of a row and of its present group, in lanes that are added up at the end:
 * then neither the order of sums nor their bits depend on how wide the machine's vectors are. */
typedef struct group_state {
  float most_error[LANES], most_source[LANES];
  int32_t counts[LANES]; /* of zeros, and of invalid codes << 16 */
} group_state;

typedef struct row_state {
  _Alignas(64) double source[LANES]; /* squares, */
  double error[LANES], value[LANES]; /* likewise */
  group_state group;
} row_state;

INLINE float larger(float a, float b) { return a > b ? a : b; }

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

INLINE uint8_t count_of(const int8_t *codes, int8_t code, const int cols) {
  const int count = (codes[0] == code) + (codes[LANES] == code);
  if (cols == 2 * LANES) return (uint8_t)count;
  return (uint8_t)(count + (codes[2 * LANES] == code) + (codes[3 * LANES] == code));
}

/* Adds 64 columns, or 32. The only code that can be beyond the levels is `invalid`, unless it is
 * 0: then none can. */
INLINE void compare_run(const float *w, const int8_t *codes, float step, const int8_t invalid,
                        const int cols, row_state *row) {
  group_state *const group = &row->group;
  float v[KT_AUDIT_COLS], e[KT_AUDIT_COLS];
  for (int c = 0; c < cols; c++) {
    v[c] = (float)codes[c] * step;
    e[c] = w[c] - v[c];
  }
  for (int i = 0; i < LANES; i++) row->source[i] += (double)square_sum(w + i, cols);
  for (int i = 0; i < LANES; i++) row->error[i] += (double)square_sum(e + i, cols);
  for (int i = 0; i < LANES; i++) row->value[i] += (double)square_sum(v + i, cols);
  for (int i = 0; i < LANES; i++)
    group->most_source[i] = larger(most_of(w + i, cols), group->most_source[i]);
  for (int i = 0; i < LANES; i++)
    group->most_error[i] = larger(most_of(e + i, cols), group->most_error[i]);
  for (int i = 0; i < LANES; i++) {
    const uint8_t zeros = count_of(codes + i, 0, cols);
    const uint8_t both =
        invalid ? (uint8_t)(zeros + 16 * count_of(codes + i, invalid, cols)) : zeros;
    group->counts[i] += (both | both << 12) & 0x000f000f;
  }
}

INLINE void compare_plane(const kt_audit_job *job, stored s, int64_t row, int64_t col,
                          const int cols, const int8_t invalid,
                          int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS], const float *step,
                          row_state *state) {
  float source[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  if (cols == KT_AUDIT_COLS)
    values_of_half_tile(job->source, &s, row, col, source);
  else
    values_of_group_tile(job->source, &s, row, col, source);
  for (int r = 0; r < KT_AUDIT_ROWS; r++)
    compare_run(source[r], codes[r], step[r], invalid, cols, state + r);
}

/* Half a tile of the packed matrix against its source, which s is from (row, col) on. */
INLINE void compare_half_tile(const kt_audit_job *job, stored s, int64_t row, int64_t col,
                              const float *step, row_state *state) {
  uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  const int64_t at = half_tile_at(job->format, job->rows, job->source->cols, job->first + row, col);
  bytes_by_row(job->packed + at, KT_AUDIT_COLS, bytes);
  if (job->format->planes == 1) {
    compare_plane(job, s, row, col, KT_AUDIT_COLS, -128, (int8_t (*)[KT_AUDIT_COLS])bytes, step,
                  state);
    return;
  }
  nibbles(bytes, 0, 8, KT_AUDIT_COLS, codes);
  compare_plane(job, s, row, col, KT_AUDIT_COLS, -8, codes, step, state);
  nibbles(bytes, 1, 8, KT_AUDIT_COLS, codes);
  s = stored_on(s, 0, KT_AUDIT_COLS);
  compare_plane(job, s, row, col + KT_AUDIT_COLS, KT_AUDIT_COLS, -8, codes, step, state);
}

/* The same of a tile of GINT4: the low nibbles are 16 rows, the high ones 16 more. */
INLINE void compare_group_tile(const kt_audit_job *job, stored s, int64_t row, int64_t col,
                               const float *step, row_state *state) {
  uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  const int64_t at = group_tile_at(job->source->cols, job->first + row, col);
  bytes_by_row(job->packed + at, KT_AUDIT_GROUP_COLS, bytes);
  for (int high = 0; high < 2; high++) {
    nibbles(bytes, high, 0, KT_AUDIT_GROUP_COLS, codes);
    compare_plane(job, s, row, col, KT_AUDIT_GROUP_COLS, 0, codes, step, state);
    s = stored_on(s, KT_AUDIT_ROWS, 0);
    row += KT_AUDIT_ROWS, step += KT_AUDIT_ROWS, state += KT_AUDIT_ROWS;
  }
}

/* The sums of a row once more, where binary32 squares overflow or vanish. */
static void sum_extreme_row(const kt_audit_job *job, int64_t row, row_state *state) {
  const kt_matrix *const m = job->source;
  memset(state->source, 0, sizeof state->source + sizeof state->error + sizeof state->value);
  for (int64_t c = 0; c < m->cols; c++) {
    const int code = code_at(job->format, job->packed, job->rows, m->cols, job->first + row, c);
    const float step = job->format->units * scale_at(job, row, c / job->group);
    const int64_t in_run = c % KT_AUDIT_GROUP_COLS, from = c - in_run;
    float run[1][KT_AUDIT_COLS];
    const stored s = stored_from(m, row, from);
    source_values(m, &s, 1, row, from, KT_AUDIT_GROUP_COLS, run);
    const double w = (double)run[0][in_run], v = (double)((float)code * step);
    state->source[0] += w * w;
    state->error[0] += (w - v) * (w - v);
    state->value[0] += v * v;
  }
}

static double total(const double *lane) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += lane[i];
  return sum;
}

static float largest(const float *lane) {
  float most = 0;
  for (int i = 0; i < LANES; i++) most = larger(lane[i], most);
  return most;
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
  const double steps = (double)job->error[at] / ((double)job->format->units * scale);
  if (scale > 0 && steps > audit->max_steps) audit->max_steps = steps;
  int64_t zeros = 0, invalid = 0;
  for (int i = 0; i < LANES; i++) {
    zeros += found->counts[i] & 0xffff;
    invalid += found->counts[i] >> 16;
  }
  audit->zeros += zeros;
  audit->invalid += scale == 0 ? job->group - zeros : invalid;
  memset(found, 0, sizeof *found);
}

static void finish_row(const kt_audit_job *job, int64_t row, row_state *state, kt_audit *audit) {
  float amax = 0;
  for (int64_t g = 0; g < job->groups; g++) amax = larger(job->amax[row * job->groups + g], amax);
  if (amax < 0x1p-40f || amax > 0x1p40f) sum_extreme_row(job, row, state);
  audit->squared_source += total(state->source);
  audit->squared_error += total(state->error);
  audit->squared_value += total(state->value);
}

INLINE void audit_rows(const kt_audit_job *job, const int grouped, kt_audit *audit) {
  const kt_matrix *const m = job->source;
  const int64_t tile_cols = kt_audit_tile_cols(job->format);
  const int gather =
      m->col_stride != 1 && m->row_stride == 1 && audit_units[m->dtype].cols <= KT_AUDIT_GROUP_COLS;
  const int64_t at_once = gather || grouped ? 2 * KT_AUDIT_ROWS : KT_AUDIT_ROWS;
  for (int64_t row = 0; row < m->rows; row += at_once) {
    row_state state[2 * KT_AUDIT_ROWS];
    float step[2 * KT_AUDIT_ROWS]; /* between two codes */
    uint8_t room[2 * KT_AUDIT_COLS * 2 * KT_AUDIT_ROWS * 4];
    memset(state, 0, (size_t)at_once * sizeof state[0]);
    for (int64_t g = 0; g < job->groups; g++) {
      for (int64_t r = 0; r < at_once; r++)
        step[r] = job->format->units * scale_at(job, row + r, g);
      for (int64_t col = g * job->group; col < (g + 1) * job->group; col += tile_cols) {
        const stored from = stored_from(m, row, col);
        const stored s = gather ? gathered(from, tile_cols, room) : from;
        if (grouped)
          compare_group_tile(job, s, row, col, step, state);
        else
          for (int64_t half = 0; half < at_once; half += KT_AUDIT_ROWS)
            compare_half_tile(job, stored_on(s, half, 0), row + half, col, step + half,
                              state + half);
      }
      for (int64_t r = 0; r < at_once; r++) finish_group(job, row + r, g, &state[r].group, audit);
    }
    for (int64_t r = 0; r < at_once; r++) finish_row(job, row + r, state + r, audit);
  }
}

/* Functions of their own: as one, compilers make slower code of the first. */
static __attribute__((noinline)) void audit_tiles(const kt_audit_job *job, kt_audit *audit) {
  audit_rows(job, 0, audit);
}

static __attribute__((noinline)) void audit_groups(const kt_audit_job *job, kt_audit *audit) {
  audit_rows(job, 1, audit);
}

static void audit_all(const kt_audit_job *job, kt_audit *audit) {
  (job->format->row_block ? audit_tiles : audit_groups)(job, audit);
}

#endif
