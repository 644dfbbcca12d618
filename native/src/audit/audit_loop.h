/* audit_loop.h - the pass, included by one file per level. See audit.h. */
#ifndef KT_AUDIT_LOOP_H
#define KT_AUDIT_LOOP_H

#include "audit_source.h"

#include <math.h>
#include <string.h>

enum { LANES = 16 };

/* ---- Where half a tile begins: SPEC 4.2 of docs/formats.md ---------------- */

/* Byte of element (row, col), both multiples of 16 rows and of a tile's columns. */
INLINE int64_t half_tile_at(const kt_audit_format *format, int64_t rows, int64_t cols, int64_t row,
                            int64_t col) {
  const int64_t row_block = format->row_block, col_block = 3584;
  const int64_t nb = row / row_block * row_block, ns = least(row_block, rows - nb);
  const int64_t kb = col / col_block * col_block, ks = least(col_block, cols - kb);
  const int64_t strip = (row - nb) / 32 * 32, half = (row - nb) % 32 / 16;
  const int64_t elements = nb * cols + kb * ns + strip * ks + (col - kb) * 32;
  return elements / format->planes + half * KT_AUDIT_HALF;
}

/* Group g of 64 bytes holds columns 4g .. 4g + 3 of the 16 rows, one row after the other. */
INLINE void bytes_by_row(const uint8_t *half, uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS]) {
  for (int g = 0; g < KT_AUDIT_COLS / 4; g++)
    for (int r = 0; r < KT_AUDIT_ROWS; r++) memcpy(&bytes[r][4 * g], half + 64 * g + 4 * r, 4);
}

/* Low (0) or high (1) nibbles as numbers -8..7. */
INLINE void nibbles(uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS], int high,
                    int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS]) {
  for (int r = 0; r < KT_AUDIT_ROWS; r++)
    for (int c = 0; c < KT_AUDIT_COLS; c++) {
      const int nibble = (bytes[r][c] >> (high ? 4 : 0)) & 15;
      codes[r][c] = (int8_t)((nibble ^ 8) - 8);
    }
}

/* ---- Comparing --------------------------------------------------------------- */

/* What is known of a row so far, in lanes that are added up at its end: then neither the
 * order of sums nor their bits depend on how wide the machine's vectors are. */
typedef struct row_state {
  double source[LANES], error[LANES], value[LANES]; /* squares */
  float most_error[LANES], most_source[LANES];
  int32_t zeros[LANES], invalid[LANES];
} row_state;

INLINE float larger(float a, float b) { return a > b ? a : b; }

/* Of one lane: 4 of 64 columns. */
INLINE float square_sum(const float *x) {
  return x[0] * x[0] + x[LANES] * x[LANES] +
         (x[2 * LANES] * x[2 * LANES] + x[3 * LANES] * x[3 * LANES]);
}

INLINE float most_of(const float *x) {
  return larger(larger(fabsf(x[0]), fabsf(x[LANES])),
                larger(fabsf(x[2 * LANES]), fabsf(x[3 * LANES])));
}

INLINE uint8_t zeros_of(const int8_t *code) {
  return (uint8_t)((code[0] == 0) + (code[LANES] == 0) + (code[2 * LANES] == 0) +
                   (code[3 * LANES] == 0));
}

INLINE uint8_t is_beyond(int8_t code, int8_t level) { return code > level || code < -level; }

INLINE uint8_t invalid_of(const int8_t *code, int8_t level) {
  return (uint8_t)(is_beyond(code[0], level) + is_beyond(code[LANES], level) +
                   is_beyond(code[2 * LANES], level) + is_beyond(code[3 * LANES], level));
}

/* Adds 64 columns. `step` is the distance of two levels. */
INLINE void compare_run(const float *w, const int8_t *codes, float step, int8_t level,
                        row_state *row) {
  float v[KT_AUDIT_COLS], e[KT_AUDIT_COLS];
  for (int c = 0; c < KT_AUDIT_COLS; c++) {
    v[c] = (float)codes[c] * step;
    e[c] = w[c] - v[c];
  }
  for (int i = 0; i < LANES; i++) row->source[i] += (double)square_sum(w + i);
  for (int i = 0; i < LANES; i++) row->error[i] += (double)square_sum(e + i);
  for (int i = 0; i < LANES; i++) row->value[i] += (double)square_sum(v + i);
  for (int i = 0; i < LANES; i++) row->most_source[i] = larger(most_of(w + i), row->most_source[i]);
  for (int i = 0; i < LANES; i++) row->most_error[i] = larger(most_of(e + i), row->most_error[i]);
  for (int i = 0; i < LANES; i++) row->zeros[i] += zeros_of(codes + i);
  for (int i = 0; i < LANES; i++) row->invalid[i] += invalid_of(codes + i, level);
}

INLINE void compare_plane(const kt_audit_job *job, stored s, int64_t row, int64_t col,
                          int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS], row_state *state) {
  for (int r = 0; r < KT_AUDIT_ROWS; r++) {
    float source[KT_AUDIT_COLS];
    const float scale = job->scale[job->first + row + r];
    source_values(job->source, s, r, row + r, col, source);
    /* The two levels as constants: compilers make better vectors of comparing with them. */
    compare_run(source, codes[r], job->format->units * scale, job->format->planes == 2 ? 7 : 127,
                state + r);
  }
}

/* Half a tile of the packed matrix against its source, which s is from (row, col) on. */
INLINE void compare_half_tile(const kt_audit_job *job, stored s, int64_t row, int64_t col,
                              row_state *state) {
  uint8_t bytes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  int8_t codes[KT_AUDIT_ROWS][KT_AUDIT_COLS];
  const int64_t at = half_tile_at(job->format, job->rows, job->source->cols, job->first + row, col);
  bytes_by_row(job->packed + at, bytes);
  if (job->format->planes == 1) {
    memcpy(codes, bytes, sizeof codes);
    compare_plane(job, s, row, col, codes, state);
    return;
  }
  nibbles(bytes, 0, codes);
  compare_plane(job, s, row, col, codes, state);
  nibbles(bytes, 1, codes);
  s = stored_on(s, 0, KT_AUDIT_COLS);
  compare_plane(job, s, row, col + KT_AUDIT_COLS, codes, state);
}

/* The sums of a row once more, where binary32 squares overflow or vanish. */
static void sum_extreme_row(const kt_audit_job *job, int64_t row, row_state *state) {
  const float scale = job->scale[job->first + row];
  const float step = job->format->units * scale;
  const int64_t tile_cols = job->format->planes * KT_AUDIT_COLS;
  const int64_t half_row = row % KT_AUDIT_ROWS;
  memset(state->source, 0, sizeof state->source + sizeof state->error + sizeof state->value);
  for (int64_t c = 0; c < job->source->cols; c++) {
    const int64_t in_tile = c % tile_cols, plane_col = in_tile % KT_AUDIT_COLS;
    const int64_t at = half_tile_at(job->format, job->rows, job->source->cols,
                                    job->first + row - half_row, c - in_tile);
    const uint8_t byte = job->packed[at + plane_col / 4 * 64 + half_row * 4 + plane_col % 4];
    const int nibble = byte >> (in_tile < KT_AUDIT_COLS ? 0 : 4) & 15;
    const int code = job->format->planes == 2 ? (nibble ^ 8) - 8 : (int8_t)byte;
    float run[KT_AUDIT_COLS];
    source_values(job->source, stored_from(job->source, row, c - plane_col), 0, row, c - plane_col,
                  run);
    const double w = (double)run[plane_col], v = (double)((float)code * step);
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

static void finish_row(const kt_audit_job *job, int64_t row, row_state *state, kt_audit *audit) {
  const float amax = largest(state->most_source);
  if (amax < 0x1p-40f || amax > 0x1p40f) sum_extreme_row(job, row, state);
  job->amax[row] = amax;
  job->rule[row] = job->format->rule(amax);
  job->error[row] = largest(state->most_error);
  const double scale = (double)job->scale[job->first + row];
  const double steps = (double)job->error[row] / ((double)job->format->units * scale);
  if (scale > 0 && steps > audit->max_steps) audit->max_steps = steps;
  audit->squared_source += total(state->source);
  audit->squared_error += total(state->error);
  audit->squared_value += total(state->value);
  int64_t zeros = 0, invalid = 0;
  for (int i = 0; i < LANES; i++) {
    zeros += state->zeros[i];
    invalid += state->invalid[i];
  }
  audit->zeros += zeros;
  audit->invalid += scale == 0 ? job->source->cols - zeros : invalid;
}

static void audit_all(const kt_audit_job *job, kt_audit *audit) {
  const kt_matrix *const m = job->source;
  const int64_t tile_cols = job->format->planes * KT_AUDIT_COLS;
  const int gather = m->col_stride != 1 && m->row_stride == 1;
  const int64_t at_once = gather ? 2 * KT_AUDIT_ROWS : KT_AUDIT_ROWS;
  for (int64_t row = 0; row < m->rows; row += at_once) {
    row_state state[2 * KT_AUDIT_ROWS];
    uint8_t room[2 * KT_AUDIT_COLS * 2 * KT_AUDIT_ROWS * 4];
    memset(state, 0, (size_t)at_once * sizeof state[0]);
    for (int64_t col = 0; col < m->cols; col += tile_cols) {
      const stored from = stored_from(m, row, col);
      const stored s = gather ? gathered(from, tile_cols, room) : from;
      for (int64_t half = 0; half < at_once; half += KT_AUDIT_ROWS)
        compare_half_tile(job, stored_on(s, half, 0), row + half, col, state + half);
    }
    for (int64_t r = 0; r < at_once; r++) finish_row(job, row + r, state + r, audit);
  }
}

#endif
