/* random_weights.h - random calls of what decodes, quantizes, packs, encodes and audits weights. */
#ifndef KT_TEST_RANDOM_WEIGHTS_H
#define KT_TEST_RANDOM_WEIGHTS_H

#include "random_calls.h"

/* ---- Layouts ----------------------------------------------------------------------- */

enum { MOST_LAYOUTS = 40 };
static kt_layout layouts[MOST_LAYOUTS];
static int layout_count;
static uint64_t packings[MOST_LAYOUTS][MOST_LEVELS]; /* by quantize_pack, or by pack */

static inline void find_layouts(void) {
  static const int32_t groups[] = {0, 16, 32, 64, 128, 256};
  kt_layout_traits traits;
  for (int32_t format = 0; format <= KT_FORMAT_MXFP8; format++)
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
      for (int32_t scale = KT_SCALE_NONE; scale <= KT_SCALE_UE8M0; scale++) {
        const kt_layout layout = {format, groups[g], scale};
        if (kt_layout_describe(&layout, &traits) != KT_OK) continue;
        if (layout_count == MOST_LAYOUTS) exit(2);
        layouts[layout_count++] = layout;
      }
}

static inline const char *layout_name(const kt_layout *layout) {
  static const char *const formats[] = {"int8",  "int4",  "bf16",  "fp8",  "mxfp4",
                                        "gint4", "gint8", "nvfp4", "mxfp8"};
  static const char *const scales[] = {"", ",f32", ",bf16", ",ue8m0"};
  static char name[40];
  snprintf(name, sizeof name, "%s,%d%s", formats[layout->format], layout->group,
           scales[layout->scale_dtype]);
  return name;
}

/* Bytes of plain codes and scales, as ktconv.h has their shapes. */
static inline size_t plain_size(const kt_layout_traits *t, int64_t rows, int64_t cols) {
  return (size_t)(rows * (cols * t->plain_bits / 8 + cols / 32 * t->inner_scales));
}

static inline size_t plain_scale_size(const kt_layout *layout, const kt_layout_traits *t,
                                      int64_t rows, int64_t cols) {
  const int64_t height = (rows + t->scale_rows - 1) / t->scale_rows;
  return (size_t)(height * (layout->group ? cols / layout->group : 1) * t->scale_size);
}

static inline size_t aligned_to(const kt_layout_traits *t) {
  return t->scale_size ? (size_t)t->scale_size : 1;
}

/* ---- Source matrices ------------------------------------------------------------------ */

typedef struct source {
  kt_matrix m;
  kt_stored_unit unit;
  int wild; /* any bytes */
} source;

static inline int is_ggml(int dtype) { return dtype >= KT_Q4_0 && dtype <= KT_Q2_0; }

static inline int needs_scales(int dtype) {
  return dtype >= KT_F8_E4M3 && dtype != KT_BF16 && !is_ggml(dtype);
}

static inline void fill_data(const source *s, void *data, size_t size) {
  static const uint16_t halves[] = {0, 0x8000, 1, 0x8001, 0x3c00, 0x03ff, 0x0400, 0x7bff, 0xfbff};
  const int dtype = s->m.dtype;
  uint8_t *const bytes = data;
  draw_bytes(data, size);
  for (size_t i = 0; dtype == KT_F32 && i < size; i += 4) {
    const float value = s->wild ? draw_float(one_in(2000)) : unit() / 16;
    memcpy(bytes + i, &value, 4);
  }
  for (size_t i = 0; (dtype == KT_BF16 || dtype == KT_F16) && i < size; i += 2) {
    const float value = s->wild ? draw_float(one_in(2000)) : unit() / 16;
    uint16_t half = dtype == KT_BF16 ? bf16(value) : (uint16_t)(draw() & 0xbbff);
    if (s->wild && dtype == KT_F16 && one_in(8)) half = ONE_OF(halves);
    if (s->wild && dtype == KT_F16 && one_in(20000)) half = (uint16_t)(0x7c00 | draw());
    memcpy(bytes + i, &half, 2);
  }
  for (size_t i = 0; dtype == KT_F8_E4M3 && i < size; i++)
    if ((bytes[i] & 0x7f) == 0x7f && !(s->wild && one_in(100))) bytes[i] ^= 0x40;
  /* No half precision that is not finite among the scales of blocks. */
  for (size_t i = 0; is_ggml(dtype) && i < size; i++)
    if (!s->wild || !one_in(1000)) bytes[i] &= dtype == KT_MXFP4 ? 0x7d : 0x7b;
}

static inline float *draw_grid(size_t count, int wild, int zeros) {
  float *const grid = room(count * sizeof *grid, sizeof *grid);
  for (size_t i = 0; i < count; i++) {
    grid[i] = zeros ? (float)below(16) : 0.01f * (1.5f + unit());
    if (wild && one_in(50)) grid[i] = draw_float(one_in(500));
  }
  return grid;
}

/* Scales, zero points and groups of a matrix with sizes; blocks of any size. */
static inline void draw_scaling(source *s) {
  kt_matrix *const m = &s->m;
  static const int64_t sizes[] = {1, 7, 16, 32, 100, 128, 1000, INT64_MAX / 4};
  m->block_rows = one_in(2) ? 1 : ONE_OF(sizes), m->block_cols = ONE_OF(sizes);
  m->row_origin = one_in(2) ? 0 : below(200), m->col_origin = one_in(2) ? 0 : below(200);
  const int64_t width = (m->col_origin + m->cols - 1) / m->block_cols + 1;
  const int64_t height = (m->row_origin + m->rows - 1) / m->block_rows + 1;
  m->scale_stride = width + (one_in(2) ? 0 : below(5));
  const size_t count = (size_t)((height - 1) * m->scale_stride + width);
  m->block_scale = seal(draw_grid(count, s->wild, 0));
  if (one_in(2)) m->zero_point = seal(draw_grid(count, s->wild, 1));
  if (!one_in(4)) return;
  int32_t *const groups = room((size_t)m->cols * sizeof *groups, sizeof *groups);
  for (int64_t k = 0; k < m->cols; k++) groups[k] = (int32_t)below(width);
  m->group_of_col = seal(groups);
}

static inline const float *some_factors(int64_t count, int wild) {
  float *const factors = room((size_t)count * sizeof *factors, sizeof *factors);
  for (int64_t i = 0; i < count; i++) {
    factors[i] = 1.25f + unit();
    if (wild && one_in(50)) factors[i] = draw_float(0);
  }
  return seal(factors);
}

/* A matrix of these whole units, in any place that its strides allow. */
static inline source draw_source(int dtype, int64_t rows, int64_t cols, int wild) {
  source s = {.wild = wild, .m = {.rows = rows, .cols = cols, .dtype = dtype}};
  kt_matrix *const m = &s.m;
  EXPECTED(KT_OK, CALLED(kt_dtype_unit, dtype, &s.unit));
  if (is_ggml(dtype)) m->first_col = below(s.unit.cols / 32) * 32;
  const int64_t high = rows / s.unit.rows;
  const int64_t wide = (m->first_col + cols + s.unit.cols - 1) / s.unit.cols;
  const int64_t pad = one_in(2) ? 0 : below(40);
  const int transposed = one_in(3);
  m->row_stride = transposed ? 1 : wide + pad, m->col_stride = transposed ? high + pad : 1;
  if (one_in(40)) m->row_stride = m->col_stride = 1; /* elements that are several elements */
  const int64_t units = (high - 1) * m->row_stride + (wide - 1) * m->col_stride + 1;
  const size_t size = (size_t)(units * s.unit.bytes);
  void *const data = room(size, 1);
  fill_data(&s, data, size);
  m->data = seal(data);
  m->round_to_bf16 = one_in(2);
  if (needs_scales(dtype) || one_in(5)) draw_scaling(&s);
  if (one_in(5)) m->row_factor = some_factors(rows, wild);
  if (one_in(5)) m->col_factor = some_factors(cols, wild);
  return s;
}

static inline void describe(const source *s, const char *of) {
  const kt_matrix *const m = &s->m;
  snprintf(inputs, sizeof inputs,
           "%s, dtype %d [%" PRId64 ", %" PRId64 "] from column %" PRId64 ", strides %" PRId64
           " %" PRId64 ", blocks %" PRId64 " x %" PRId64 " from %" PRId64 ", %" PRId64
           "%s%s%s%s%s%s%s",
           of, m->dtype, m->rows, m->cols, m->first_col, m->row_stride, m->col_stride,
           m->block_rows, m->block_cols, m->row_origin, m->col_origin, s->wild ? ", wild" : "",
           m->block_scale ? ", scales" : "", m->zero_point ? ", zero points" : "",
           m->group_of_col ? ", groups" : "", m->row_scale ? ", row scales" : "",
           m->row_factor ? ", row factors" : "", m->col_factor ? ", column factors" : "");
}

/* What kt_decode makes of a matrix, as it is at the first level; the first number that is not
 * finite, and the largest magnitude. */
typedef struct truth {
  float *values, largest;
  kt_status status;
  kt_position bad;
} truth;

static inline void decode_at_levels(const source *s, truth *t) {
  const kt_matrix *const m = &s->m;
  const size_t size = (size_t)(m->rows * m->cols) * sizeof *t->values;
  const int kept_pieces = piece_count;
  kept first = {0};
  *t = (truth){.values = malloc(size)};
  if (!t->values) exit(2);
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    float *const out = room(size, sizeof *out);
    EXPECTED(KT_OK, CALLED(kt_decode, m, out));
    compare(&first, 0, "a decoded matrix", out, size, 1);
    if (i == 0) memcpy(t->values, out, size);
    release_rooms(kept_pieces);
  }
  forget(&first);
  for (int64_t i = 0; i < m->rows * m->cols && !t->status; i++) {
    t->largest = fmaxf(t->largest, fabsf(t->values[i]));
    if (isfinite(t->values[i])) continue;
    t->status = KT_ERR_NONFINITE, t->bad = (kt_position){i / m->cols, i % m->cols};
  }
}

static inline void *scratch_of(int64_t cols) { return room(kt_scratch_size(cols), sizeof(float)); }

/* The status, and where. */
static inline void expect_truth(const truth *t, const char *what, kt_status status,
                                const kt_position *bad) {
  if (status != t->status)
    FAILED("%s: %s, not: %s", what, kt_strerror(status), kt_strerror(t->status));
  if (status == KT_ERR_NONFINITE && bad && (bad->row != t->bad.row || bad->col != t->bad.col))
    FAILED("%s: not finite at %" PRId64 ", %" PRId64 ", not at %" PRId64 ", %" PRId64, what,
           bad->row, bad->col, t->bad.row, t->bad.col);
}

static inline void check_largest(const source *s, const truth *t) {
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    kt_position *const bad = one_in(2) ? NULL : room(sizeof *bad, sizeof(int64_t));
    float *const largest = room(sizeof *largest, sizeof *largest);
    const kt_status status =
        CALLED(kt_largest, &s->m, largest, scratch_of(s->m.cols), kt_scratch_size(s->m.cols), bad);
    expect_truth(t, "kt_largest", status, bad);
    if (status == KT_OK && *largest != t->largest)
      FAILED("largest is %g, not %g", (double)*largest, (double)t->largest);
    release_rooms(kept_pieces);
  }
}

/* Matrices of any size that units allow. */
static void decode_case(int dtype) {
  static const int64_t counts[] = {1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 100, 129};
  kt_stored_unit unit;
  truth t;
  kt_dtype_unit(dtype, &unit);
  const int64_t cols = is_ggml(dtype) ? 32 * (1 + below(12)) : unit.cols * ONE_OF(counts);
  const source s = draw_source(dtype, unit.rows * ONE_OF(counts), cols, one_in(2));
  describe(&s, "decode");
  decode_at_levels(&s, &t);
  check_largest(&s, &t);
  free(t.values);
}

/* ---- Quantize, pack, audit -------------------------------------------------------------- */

typedef struct weights_case {
  kt_layout layout;
  kt_layout_traits traits;
  int64_t rows, cols;
  source source;
  kt_choice choice;
  size_t packed_size, scale_size, plain_size, plain_scale_size, scratch_size;
} weights_case;

static inline void draw_choice(weights_case *c) {
  c->choice.rule = (int32_t)below(3);
  if (c->choice.rule == KT_RULE_AMAX || one_in(2)) return;
  float *const importance = room((size_t)c->cols * sizeof *importance, sizeof *importance);
  for (int64_t k = 0; k < c->cols; k++)
    importance[k] = one_in(20) ? 0.0f : one_in(20) ? 0x1p32f : 1.5f + unit();
  c->choice.importance = seal(importance);
}

static inline weights_case draw_weights(const kt_layout *layout, int dtype) {
  weights_case c = {.layout = *layout};
  EXPECTED(KT_OK, CALLED(kt_layout_describe, layout, &c.traits));
  c.rows = 32 * (1 + below(one_in(4) ? 8 : 3));
  c.cols = c.traits.col_multiple * (1 + below(one_in(8) ? 12 : 4));
  if (one_in(60)) c.rows = 32, c.cols = 3584 + c.traits.col_multiple * (1 + below(2));
  c.source = draw_source(dtype, c.rows, c.cols, one_in(2));
  draw_choice(&c);
  const int keeps = layout->format == KT_FORMAT_INT8 || layout->format == KT_FORMAT_INT4;
  if (keeps && one_in(4)) {
    c.source.m.row_factor = c.source.m.col_factor = NULL;
    c.source.m.row_scale = some_factors(c.rows, c.source.wild);
  }
  c.packed_size = kt_packed_size(layout, c.rows, c.cols);
  c.scale_size = kt_scale_size(layout, c.rows, c.cols);
  c.plain_size = plain_size(&c.traits, c.rows, c.cols);
  c.plain_scale_size = plain_scale_size(layout, &c.traits, c.rows, c.cols);
  c.scratch_size = kt_scratch_size(c.cols);
  counted(OF_kt_packed_size, c.packed_size > 0);
  counted(OF_kt_scale_size, (c.scale_size > 0) == (layout->scale_dtype != KT_SCALE_NONE));
  describe(&c.source, layout_name(layout));
  return c;
}

/* Rows first .. first + rows - 1 of a matrix. */
static inline kt_matrix rows_of(const source *s, int64_t first, int64_t rows) {
  kt_matrix m = s->m;
  m.data = (const uint8_t *)m.data + first / s->unit.rows * m.row_stride * s->unit.bytes;
  m.rows = rows, m.row_origin += first;
  if (m.row_scale) m.row_scale += first;
  if (m.row_factor) m.row_factor += first;
  return m;
}

/* Of all rows, or of some. */
static inline void audit_weights(const weights_case *c, const void *packed, const void *scale,
                                 int64_t first, int64_t rows, kept *k) {
  const kt_matrix m = rows_of(&c->source, first, rows);
  const int64_t scales = rows * (c->layout.group ? c->cols / c->layout.group : 1);
  const size_t size = (size_t)scales * sizeof(float);
  float *const error = room(size, 4), *const amax = room(size, 4), *const rule = room(size, 4);
  double *const squared = one_in(3) ? NULL : room((size_t)rows * 16, sizeof *squared);
  kt_audit *const found = room(sizeof *found, sizeof(double));
  int8_t *const codes = room((size_t)(c->rows * c->cols), 1);
  EXPECTED(KT_OK, CALLED(kt_audit_run, &c->layout, &m, &c->choice, c->rows, first, packed, scale,
                         error, amax, rule, squared, found, scratch_of(c->cols), c->scratch_size));
  EXPECTED(KT_OK, CALLED(kt_audit_codes, &c->layout, packed, c->rows, c->cols, codes));
  if (found->invalid) FAILED("the audit finds %" PRId64 " invalid codes", found->invalid);
  compare(k, 4, "errors of the audit", error, size, 1);
  compare(k, 5, "largest weights of the audit", amax, size, 1);
  compare(k, 6, "scales of the audit", rule, size, 1);
  compare(k, 7, "the audit", found, sizeof *found, 1);
}

/* Both in one pass, of all rows: what was packed, and what the audit of it finds. */
static inline void prove_weights(const weights_case *c, const truth *t, const kt_choice *choice,
                                 const void *packed, const void *scale, kt_position *bad) {
  const int64_t scales = c->rows * (c->layout.group ? c->cols / c->layout.group : 1);
  const size_t size = (size_t)scales * sizeof(float), rows_size = (size_t)c->rows * 16;
  void *const again = room(c->packed_size, 1);
  void *const scale_again = room(c->scale_size, aligned_to(&c->traits));
  float *const maxima[2][3] = {{room(size, 4), room(size, 4), room(size, 4)},
                               {room(size, 4), room(size, 4), room(size, 4)}};
  double *const squared[2] = {room(rows_size, 8), room(rows_size, 8)};
  kt_audit *const expected = room(sizeof *expected, 8);
  enum { TWICE = 2 }; /* the same matrix, into the same memory */
  kt_proven *const all = room(TWICE * sizeof *all, 8);
  const kt_proven one = {.matrix = &c->source.m,
                         .choice = choice,
                         .packed = again,
                         .packed_scale = scale_again,
                         .error = maxima[0][0],
                         .amax = maxima[0][1],
                         .rule = maxima[0][2],
                         .squared = squared[0]};
  all[0] = all[1] = one;
  int64_t *const failed = one_in(3) ? NULL : room(sizeof *failed, 8);
  const kt_status status = CALLED(kt_quantize_audit, &c->layout, all, TWICE, scratch_of(c->cols),
                                  c->scratch_size, failed, bad);
  expect_truth(t, "kt_quantize_audit", status, bad);
  if (status != KT_OK && failed && *failed) FAILED("kt_quantize_audit names another matrix");
  if (status != KT_OK) return;
  if (memcmp(&all[0], &all[1], sizeof *all)) FAILED("kt_quantize_audit: two results of a matrix");
  if (memcmp(again, packed, c->packed_size) || memcmp(scale_again, scale, c->scale_size))
    FAILED("kt_quantize_audit packs other bytes than kt_quantize_pack");
  counted(OF_kt_byte_sum, kt_byte_sum(packed, c->packed_size) == all[0].sums[0]);
  counted(OF_kt_byte_sum, kt_byte_sum(scale, c->scale_size) == all[0].sums[1]);
  uint64_t sum;
  const int same = kt_same_bytes(again, packed, c->packed_size, &sum);
  counted(OF_kt_same_bytes, same && sum == all[0].sums[0]);
  EXPECTED(KT_OK, CALLED(kt_audit_run, &c->layout, &c->source.m, choice, c->rows, 0, packed, scale,
                         maxima[1][0], maxima[1][1], maxima[1][2], squared[1], expected,
                         scratch_of(c->cols), c->scratch_size));
  all[0].audit.squared_value = expected->squared_value; /* added up in another order */
  if (memcmp(maxima[0][0], maxima[1][0], size) || memcmp(maxima[0][1], maxima[1][1], size) ||
      memcmp(maxima[0][2], maxima[1][2], size) || memcmp(squared[0], squared[1], rows_size) ||
      memcmp(&all[0].audit, expected, sizeof *expected))
    FAILED("kt_quantize_audit finds something else than kt_audit_run");
}

static inline void quantize_at_level(const weights_case *c, const truth *t, int64_t first,
                                     int64_t rows, kept *k) {
  const size_t unit = aligned_to(&c->traits);
  const kt_matrix *const m = &c->source.m;
  const kt_choice *const choice = c->choice.rule == KT_RULE_AMAX && one_in(2) ? NULL : &c->choice;
  kt_position *const bad = one_in(3) ? NULL : room(sizeof *bad, sizeof(int64_t));
  void *const codes = room(c->plain_size, 1), *const scale = room(c->plain_scale_size, unit);
  void *const packed = room(c->packed_size, 1), *const packed_scale = room(c->scale_size, unit);
  void *const again = room(c->packed_size, 1), *const scale_again = room(c->scale_size, unit);
  kt_status status = CALLED(kt_quantize, &c->layout, m, choice, codes, scale, scratch_of(c->cols),
                            c->scratch_size, bad);
  expect_truth(t, "kt_quantize", status, bad);
  status = CALLED(kt_quantize_pack, &c->layout, m, choice, packed, packed_scale,
                  scratch_of(c->cols), c->scratch_size, bad);
  expect_truth(t, "kt_quantize_pack", status, bad);
  prove_weights(c, t, choice, packed, packed_scale, bad);
  if (status != KT_OK) return;
  compare(k, 0, "codes", codes, c->plain_size, 0);
  compare(k, 1, "scales", scale, c->plain_scale_size, 0);
  compare(k, 2, "packed codes", packed, c->packed_size, 0);
  compare(k, 3, "packed scales", packed_scale, c->scale_size, 0);
  EXPECTED(KT_OK, CALLED(kt_pack, &c->layout, c->rows, c->cols, codes, scale, again, scale_again));
  if (memcmp(again, packed, c->packed_size) || memcmp(scale_again, packed_scale, c->scale_size))
    FAILED("quantize and pack are not quantize_pack");
  audit_weights(c, packed, packed_scale, first, rows, k);
}

/* Codes of a checkpoint, whoever chose them, and any bytes. */
static inline void place_at_level(const weights_case *c, const void *codes, const void *scale,
                                  kept *k) {
  const size_t unit = aligned_to(&c->traits);
  const int scaled = !one_in(4);
  void *const packed = room(c->packed_size, 1), *const packed_scale = room(c->scale_size, unit);
  void *const back = room(c->plain_size, 1), *const scale_back = room(c->plain_scale_size, unit);
  EXPECTED(KT_OK, CALLED(kt_pack, &c->layout, c->rows, c->cols, codes, scaled ? scale : NULL,
                         packed, scaled ? packed_scale : NULL));
  EXPECTED(KT_OK, CALLED(kt_unpack, &c->layout, c->rows, c->cols, packed,
                         scaled ? packed_scale : NULL, back, scaled ? scale_back : NULL));
  compare(k, 0, "packed codes", packed, c->packed_size, 0);
  if (memcmp(back, codes, c->plain_size)) FAILED("unpacked codes are other ones");
  if (scaled && memcmp(scale_back, scale, c->plain_scale_size))
    FAILED("unpacked scales are other ones");
  draw_bytes(packed, c->packed_size);
  EXPECTED(KT_OK, CALLED(kt_unpack, &c->layout, c->rows, c->cols, packed, NULL, back, NULL));
  draw_bytes(back, c->plain_size);
  (void)CALLED(kt_pack, &c->layout, c->rows, c->cols, back, scale, packed, packed_scale);
}

static void weights_case_of(int number) {
  const kt_layout *const layout = layouts + number;
  const weights_case c = draw_weights(layout, (int)below(KT_DTYPE_COUNT));
  uint8_t *const codes = room(c.plain_size, 1);
  void *const scale = room(c.plain_scale_size + 4, 4);
  uint8_t *const drawn = malloc((size_t)(c.rows * c.cols) * 2);
  if (!drawn) exit(2);
  draw_codes(layout, drawn, c.rows * c.cols);
  memcpy(codes, drawn, c.plain_size);
  free(drawn);
  if (c.traits.scale_size)
    draw_scales(layout, scale, (int64_t)c.plain_scale_size / c.traits.scale_size);
  seal(codes), seal(scale);
  kept placed = {0}, chosen = {0};
  truth t = {0};
  if (c.traits.max_level) decode_at_levels(&c.source, &t);
  const int64_t first = 32 * below(c.rows / 32), rows = 32 * (1 + below((c.rows - first) / 32));
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    place_at_level(&c, codes, scale, &placed);
    if (c.traits.max_level) quantize_at_level(&c, &t, first, rows, &chosen);
    packings[number][i]++;
    release_rooms(kept_pieces);
  }
  forget(&placed), forget(&chosen);
  free(t.values);
}

/* ---- Encodings -------------------------------------------------------------------------- */

static const int32_t encode_groups[][6] = {
    [KT_ENCODE_INT4] = {0, 32, 64, 128, 5, 96},   [KT_ENCODE_INT8] = {0, 32, 64, 128, 7, 160},
    [KT_ENCODE_FP8] = {0, 128, 0, 128, 0, 128},   [KT_ENCODE_MXFP4] = {32, 32, 32, 32, 32, 32},
    [KT_ENCODE_MXFP8] = {32, 32, 32, 32, 32, 32}, [KT_ENCODE_NVFP4] = {16, 16, 16, 16, 16, 16},
    [KT_ENCODE_BF16] = {0, 0, 0, 0, 0, 0},
};

/* kt_encode_audit finds and leaves what the two calls do. */
static inline void encode_together(const kt_encoding *e, const source *s, float tensor_scale,
                                   const void *codes, const void *scales,
                                   const kt_encoded_audit *audit) {
  const kt_matrix *const m = &s->m;
  kt_encoded *const sizes = room(sizeof *sizes, sizeof(int64_t));
  EXPECTED(KT_OK, CALLED(kt_encoded_sizes, e, m->rows, m->cols, sizes));
  const size_t size = (size_t)(sizes->row_size * m->rows);
  const size_t scale_size = (size_t)(sizes->scale_rows * sizes->scale_cols * sizes->scale_size);
  void *const own_codes = room(size, 1);
  void *const own_scales = scale_size ? room(scale_size, (size_t)sizes->scale_size) : NULL;
  kt_encoded_audit *const found = room(sizeof *found, sizeof(double));
  uint64_t *const sums = room(2 * sizeof *sums, sizeof *sums);
  EXPECTED(KT_OK, CALLED(kt_encode_audit, e, m, tensor_scale, own_codes, own_scales,
                         scratch_of(m->cols), kt_scratch_size(m->cols), found, sums, NULL));
  if (memcmp(codes, own_codes, size) || (scale_size && memcmp(scales, own_scales, scale_size)))
    FAILED("kt_encode_audit leaves other bytes than kt_encode");
  if (found->zeros != audit->zeros || found->other_codes != audit->other_codes ||
      found->other_scales != audit->other_scales ||
      memcmp(&found->max_steps, &audit->max_steps, sizeof found->max_steps))
    FAILED("kt_encode_audit finds something else than kt_audit_encoded");
  const double off = fabs(found->squared_error - audit->squared_error);
  if (off > 1e-9 * audit->squared_error) FAILED("kt_encode_audit: another squared error");
  const uint64_t wanted[2] = {kt_byte_sum(codes, size),
                              scale_size ? kt_byte_sum(scales, scale_size) : 0};
  if (memcmp(wanted, sums, sizeof wanted)) FAILED("kt_encode_audit: other sums of bytes");
}

static inline void encode_at_level(const kt_encoding *e, const source *s, const truth *t,
                                   float tensor_scale, kept *k) {
  const kt_matrix *const m = &s->m;
  kt_encoded *const sizes = room(sizeof *sizes, sizeof(int64_t));
  EXPECTED(KT_OK, CALLED(kt_encoded_sizes, e, m->rows, m->cols, sizes));
  const size_t size = (size_t)(sizes->row_size * m->rows);
  const size_t scale_size = (size_t)(sizes->scale_rows * sizes->scale_cols * sizes->scale_size);
  void *const codes = room(size, 1);
  void *const scales = sizes->scale_size ? room(scale_size, (size_t)sizes->scale_size) : NULL;
  kt_position *const bad = one_in(3) ? NULL : room(sizeof *bad, sizeof(int64_t));
  const kt_status status = CALLED(kt_encode, e, m, tensor_scale, codes, scales, scratch_of(m->cols),
                                  kt_scratch_size(m->cols), bad);
  expect_truth(t, "kt_encode", status, bad);
  if (status != KT_OK) return;
  compare(k, 0, "encoded codes", codes, size, 0);
  compare(k, 1, "encoded scales", scales ? scales : codes, scale_size, 0);
  const int64_t group = e->group ? e->group : m->cols;
  if (m->cols % 32 || (group % 32 && e->kind != KT_ENCODE_NVFP4)) return;
  if (m->rows % 32 && m->col_stride != 1) return;
  kt_encoded_audit *const audit = room(sizeof *audit, sizeof(double));
  EXPECTED(KT_OK, CALLED(kt_audit_encoded, e, m, tensor_scale, codes, scales, audit));
  if (!s->wild && (audit->other_codes || audit->other_scales))
    FAILED("the audit finds %" PRId64 " other codes and %" PRId64 " other scales",
           audit->other_codes, audit->other_scales);
  compare(k, 2, "the audit", audit, sizeof *audit, 1);
  encode_together(e, s, tensor_scale, codes, scales, audit);
}

static void encode_case(int number) {
  static const int64_t counts[] = {1, 2, 31, 32, 33, 96, 129};
  const int integers = number <= KT_ENCODE_INT8;
  kt_encoding e = {number, ONE_OF(encode_groups[number]), integers && one_in(2),
                   integers && one_in(2)};
  int dtype = (int)below(KT_DTYPE_COUNT);
  if (e.half) dtype = KT_F16;
  kt_stored_unit unit;
  kt_dtype_unit(dtype, &unit);
  const int64_t group = e.group ? e.group : 1, whole = is_ggml(dtype) ? 32 : unit.cols;
  const int64_t high = unit.rows * (one_in(2) ? 32 : ONE_OF(counts));
  int64_t cols = whole * group * (1 + below(4));
  if (cols < 300 && one_in(2)) cols *= 32;
  if (number == KT_ENCODE_FP8 && one_in(2)) cols = whole * ONE_OF(counts); /* a block that is cut */
  source s = draw_source(dtype, high > 200 ? unit.rows * 8 : high, cols, one_in(2));
  if (integers) {
    s.m.round_to_bf16 = !e.half;
    if (e.half) s.m.block_scale = s.m.zero_point = s.m.row_factor = s.m.col_factor = NULL;
    if (e.half) s.m.group_of_col = NULL;
  }
  truth t;
  describe(&s, "encode");
  decode_at_levels(&s, &t);
  const float most = 448.0f * 6.0f / t.largest;
  const float tensor_scale = isfinite(most) && most > 0 ? most : 1.0f;
  const size_t length = strlen(inputs);
  snprintf(inputs + length, sizeof inputs - length, ", kind %d, group %d%s%s", number, e.group,
           e.half ? ", half" : "", e.search ? ", search" : "");
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    encode_at_level(&e, &s, &t, tensor_scale, &k);
    release_rooms(kept_pieces);
  }
  forget(&k);
  free(t.values);
}

/* ---- Blocks of ggml --------------------------------------------------------------------- */

static const int32_t block_types[] = {KT_Q4_0, KT_Q8_0,   KT_Q4_K, KT_Q5_K,
                                      KT_Q6_K, KT_IQ4_NL, KT_MXFP4};

static inline void blocks_at_level(int32_t type, const source *s, const truth *t,
                                   const float *importance, kept *k) {
  const kt_matrix *const m = &s->m;
  kt_stored_unit unit;
  kt_dtype_unit(type, &unit);
  const size_t size = (size_t)(m->rows * (m->cols / unit.cols) * unit.bytes);
  void *const blocks = room(size, 1);
  kt_position *const bad = one_in(3) ? NULL : room(sizeof *bad, sizeof(int64_t));
  const kt_status status = CALLED(kt_encode_blocks, type, m, importance, blocks,
                                  scratch_of(m->cols), kt_scratch_size(m->cols), bad);
  if (status == KT_ERR_SCALE && t->largest > 65504) return;
  expect_truth(t, "kt_encode_blocks", status, bad);
  if (status != KT_OK) return;
  compare(k, 0, "blocks", blocks, size, 0);
  if (m->rows % 32 && m->col_stride != 1) return;
  kt_encoded_audit *const audit = room(sizeof *audit, sizeof(double));
  EXPECTED(KT_OK, CALLED(kt_audit_blocks, type, m, blocks, audit));
  if (audit->other_codes) FAILED("the audit finds %" PRId64 " other codes", audit->other_codes);
  compare(k, 1, "the audit", audit, sizeof *audit, 1);
}

static void blocks_case(int number) {
  static const int64_t counts[] = {1, 2, 9, 31, 32, 33};
  const int32_t type = block_types[number];
  const int dtype = (int)below(KT_DTYPE_COUNT);
  kt_stored_unit stored;
  kt_dtype_unit(dtype, &stored);
  const int64_t rows = stored.rows * (one_in(2) ? 32 : ONE_OF(counts));
  source s =
      draw_source(dtype, rows > 200 ? stored.rows * 8 : rows, 256 * (1 + below(4)), one_in(2));
  float *importance = NULL;
  if (one_in(2)) {
    importance = room((size_t)s.m.cols * 4, 4);
    for (int64_t i = 0; i < s.m.cols; i++)
      importance[i] = one_in(9) ? (one_in(2) ? 0 : 0x1p-149f) : 1.25f + unit();
    seal(importance);
  }
  truth t;
  describe(&s, "blocks");
  decode_at_levels(&s, &t);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    blocks_at_level(type, &s, &t, importance, &k);
    release_rooms(kept_pieces);
  }
  forget(&k);
  free(t.values);
}

/* ---- Error compensation -------------------------------------------------------------------- */

static void compensate_case(int number) {
  const int wild = number % 2;
  const int64_t rows = 1 + below(70), cols = 1 + below(KT_COMPENSATE_COLS), groups = 1 + below(9);
  const int64_t stride = rows + (one_in(2) ? 0 : below(50));
  const size_t count = (size_t)(rows * cols);
  float *const weights = room((size_t)((cols - 1) * stride + rows) * 4, 4);
  float *const factor = room((size_t)(cols * cols) * 4, 4);
  float *const step = room((size_t)(rows * groups) * 4, 4);
  int32_t *const groups_of = room((size_t)cols * 4, 4);
  snprintf(inputs, sizeof inputs, "compensate [%d, %d] at %d, %d groups%s", (int)rows, (int)cols,
           (int)stride, (int)groups, wild ? ", wild" : "");
  for (int64_t i = 0; i < (cols - 1) * stride + rows; i++)
    weights[i] = wild ? draw_float(1) : unit();
  for (int64_t i = 0; i < cols * cols; i++) factor[i] = wild ? draw_float(1) : 0.1f * unit();
  for (int64_t i = 0; i < cols; i++)
    factor[i * cols + i] = wild && one_in(9) ? 0x1p-140f : 1.5f + unit();
  for (int64_t i = 0; i < rows * groups; i++)
    step[i] = wild && one_in(9) ? draw_float(1) : 0.1f * (1.25f + unit());
  for (int64_t i = 0; i < cols; i++) groups_of[i] = (int32_t)below(groups);
  seal(weights), seal(factor), seal(step), seal(groups_of);
  kept k = {0};
  const int kept_pieces = piece_count;
  const int32_t top = one_in(2) ? 7 : 127;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    int8_t *const codes = room(count, 1);
    float *const errors = room(count * 4, 4);
    double *const loss = room((size_t)rows * 8, 8);
    memset(loss, 0, (size_t)rows * 8);
    EXPECTED(KT_OK, CALLED(kt_compensate, top, rows, cols, weights, stride, factor, step, groups,
                           groups_of, codes, errors, loss));
    compare(&k, 0, "codes", codes, count, 0);
    compare(&k, 1, "errors", errors, count * 4, 1);
    for (int64_t n = 0; n < rows; n++)
      if (isnan(loss[n])) loss[n] = 0;
    compare(&k, 2, "loss", loss, (size_t)rows * 8, 0);
    release_rooms(kept_pieces);
  }
  forget(&k);
}

#endif
