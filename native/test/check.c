/* check.c - every entry point of the library on every level of this machine, without Python.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/check.c -lm
 *
 * Sources and outputs lie against unreadable pages, behind their end or before their start,
 * and the bytes around outputs are watched. Levels are compared with scalar byte by byte,
 * and scalar with EXPECTED_HASH, which must be the same on every architecture and compiler
 * (tests/native compares scalar with the readable reference). Exit code: 0 all passed,
 * 1 something differed, 2 no memory or no such level, 3 a guard page was touched. */
#define _DEFAULT_SOURCE
#include "ktconv.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const uint64_t EXPECTED_HASH = 0xb1cc578adc441732u;

static const char *const FORMAT_NAMES[] = {"int8", "int4"};
static const char *const RULE_NAMES[] = {"amax", "search", "search with importance", "search-1"};
static const char *const DTYPE_NAMES[] = {"BF16", "F16", "F32", "F8_E4M3"};
static const int64_t ELEMENT_SIZE[] = {2, 2, 4, 1};

/* ---- Failures ----------------------------------------------------------- */

static int failures;
static char current[512]; /* the inputs, in words */
static const char *level_name = "", *rule_name = "amax";

static void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  printf("FAILED %s by %s [%s]: ", current, rule_name, level_name);
  vprintf(format, args);
  printf("\n");
  va_end(args);
  failures++;
}

static void on_fault(int signal_number) {
  static const char words[] = "FAULT: a guard page was touched: ";
  (void)signal_number;
  ssize_t written = write(1, words, sizeof words - 1);
  written += write(1, current, strlen(current));
  written += write(1, level_name, strlen(level_name));
  written += write(1, "\n", 1);
  _exit(written ? 3 : 2);
}

static void expect_status(const char *what, kt_status status, kt_status expected) {
  if (status != expected)
    fail("%s returned %d (%s), not %d", what, status, kt_strerror(status), expected);
}

static void expect_bytes(const char *what, const void *found, const void *expected, size_t size) {
  const uint8_t *a = found, *b = expected;
  for (size_t i = 0; i < size; i++)
    if (a[i] != b[i]) {
      fail("%s differs at byte %zu of %zu: %02x, not %02x", what, i, size, a[i], b[i]);
      return;
    }
}

/* ---- Buffers against guard pages ---------------------------------------- */

enum { CANARY = 0xa5 };
/* AT_END: the last byte is the last readable one. AT_START: the first is the first.
 * ODD: as AT_END, one unit (byte, or float where the API has floats) earlier. */
typedef enum placement { AT_END, AT_START, ODD, PLACEMENTS } placement;

typedef struct guarded {
  uint8_t *map, *data;
  size_t map_size, size;
} guarded;

static size_t page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static guarded guarded_new(size_t size, placement where, size_t unit) {
  const size_t page = page_size(), inner = (size + unit + page - 1) / page * page;
  guarded g = {.map_size = inner + 2 * page, .size = size};
  g.map = mmap(NULL, g.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (g.map == MAP_FAILED || mprotect(g.map, page, PROT_NONE) ||
      mprotect(g.map + page + inner, page, PROT_NONE)) {
    perror("mmap");
    exit(2);
  }
  memset(g.map + page, CANARY, inner);
  const size_t at = where == AT_START ? 0 : inner - size - (where == ODD ? unit : 0);
  g.data = g.map + page + at;
  return g;
}

/* The bytes around the data are as they were; unmaps. */
static void guarded_end(guarded *g, const char *what) {
  const size_t page = page_size();
  for (const uint8_t *at = g->map + page; at < g->map + g->map_size - page; at++) {
    if (at == g->data) at += g->size;
    if (at == g->map + g->map_size - page) break;
    if (*at != CANARY) {
      fail("%s: byte %td outside the buffer was written", what, at - g->data);
      break;
    }
  }
  munmap(g->map, g->map_size);
}

/* ---- Inputs -------------------------------------------------------------- */

static uint64_t random_state;

static uint64_t random64(void) { /* splitmix64 */
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* binary32 bits of an element of row n: every kind of row that the rules tell apart. */
static uint32_t random_f32(int64_t n, int64_t k, int64_t cols) {
  const uint64_t z = random64();
  const uint32_t sign = (uint32_t)(z & 1) << 31, mantissa = (uint32_t)(z >> 8) & 0x7fffff;
  const uint32_t ordinary = sign | (uint32_t)(116 + (z >> 32) % 10) << 23 | mantissa;
  const int special = k == (7 * n + 3) % cols;
  const float whole = (float)(int)((z >> 32) % 225) - 112.0f, half = z >> 63 ? 0.5f : 0.0f;
  switch (n % 16) {
  case 1: return sign;                                                     /* zeros of both signs */
  case 3: return sign | mantissa;                                          /* denormals only */
  case 4: return special ? 0x03fe0000 : sign | mantissa % 0x1ff << 17;     /* INT8's flush limit */
  case 5: return special ? 0x03e00000 : sign | mantissa % 0x1f0 << 17;     /* INT4's */
  case 6: return special ? 0x03fdffff : sign | mantissa;                   /* just below it */
  case 7: return special ? sign | 0x7f7f7fff : ordinary;                   /* near FLT_MAX */
  case 8: return special ? float_bits(112.0f) : float_bits(whole + half);  /* ties of INT4 */
  case 9: return special ? float_bits(-127.0f) : float_bits(whole - half); /* ties of INT8 */
  case 10: return sign | (uint32_t)((z >> 32) % 254) << 23 | mantissa;     /* any exponent */
  case 11: return sign | (uint32_t)((z >> 32) % 29) << 23 | mantissa;      /* around 2^-100 */
  case 12: return sign | 0x3f9d0000;                                       /* one magnitude */
  case 13: return special ? 0x44800000 : ordinary;                         /* an outlier */
  default: return ordinary;
  }
}

static void put_element(int dtype, uint8_t *at, uint32_t bits) {
  uint16_t half = (uint16_t)(bits >> 16);
  if (dtype == KT_F16 && (half & 0x7c00) == 0x7c00) half ^= 0x4000;
  if (dtype == KT_F32) memcpy(at, &bits, 4);
  if (dtype == KT_BF16 || dtype == KT_F16) memcpy(at, &half, 2);
  if (dtype == KT_F8_E4M3) {
    const uint8_t byte = (uint8_t)((bits >> 24 & 0x80) | (bits >> 16 & 0x7f));
    *at = (byte & 0x7f) == 0x7f ? 0x3a : byte;
  }
}

typedef struct inputs {
  int format, dtype, transposed, round;
  int64_t rows, cols, pad; /* pad: elements between stored rows */
  int64_t block_rows, block_cols, row_origin, col_origin;
  placement where;
  int factored;
} inputs;

static kt_layout layout_of(int format) { return (kt_layout){format, 0, KT_SCALE_F32}; }

typedef struct source {
  kt_matrix m;
  guarded data, grid, row_factor, col_factor, importance;
} source;

static int64_t element_at(const kt_matrix *m, int64_t n, int64_t k) {
  return (n * m->row_stride + k * m->col_stride) * ELEMENT_SIZE[m->dtype];
}

static void add_grid(const inputs *in, source *s) {
  kt_matrix *m = &s->m;
  const int64_t height = (in->row_origin + in->rows - 1) / in->block_rows + 1;
  m->scale_stride = (in->col_origin + in->cols - 1) / in->block_cols + 1;
  m->block_rows = in->block_rows, m->block_cols = in->block_cols;
  m->row_origin = in->row_origin, m->col_origin = in->col_origin;
  s->grid = guarded_new((size_t)(height * m->scale_stride) * 4, in->where, 4);
  m->block_scale = (const float *)s->grid.data;
  for (size_t i = 0; i < s->grid.size; i += 4) {
    const uint64_t z = random64();
    const uint32_t exponent = z >> 60 ? (uint32_t)(110 + z % 20) : (uint32_t)(z % 12);
    const uint32_t bits = exponent << 23 | ((uint32_t)(z >> 20) & 0x7fffff);
    memcpy(s->grid.data + i, &bits, 4);
  }
}

/* Factors of folding, or importance: powers of two times something below 2, exponents from
 * `lowest` on. */
static guarded some_factors(int64_t count, placement where, uint32_t lowest, uint32_t exponents) {
  guarded g = guarded_new(4 * (size_t)count, where, 4);
  for (size_t i = 0; i < g.size; i += 4) {
    const uint64_t z = random64();
    const uint32_t exponent = lowest + (uint32_t)(z >> 40) % exponents;
    const uint32_t bits = z % 16 ? exponent << 23 | ((uint32_t)(z >> 8) & 0x7fffff) : 0;
    memcpy(g.data + i, &bits, 4);
  }
  return g;
}

static void add_factors(const inputs *in, source *s) {
  s->row_factor = some_factors(in->rows, in->where, 124, 3);
  s->col_factor = some_factors(in->cols, in->where, 124, 3);
  s->m.row_factor = (const float *)s->row_factor.data;
  s->m.col_factor = (const float *)s->col_factor.data;
}

static source source_new(const inputs *in) {
  source s = {.m = {.rows = in->rows, .cols = in->cols, .dtype = in->dtype}};
  kt_matrix *m = &s.m;
  m->row_stride = in->transposed ? 1 : in->cols + in->pad;
  m->col_stride = in->transposed ? in->rows + in->pad : 1;
  m->round_to_bf16 = in->round;
  const int64_t size = element_at(m, in->rows - 1, in->cols - 1) + ELEMENT_SIZE[in->dtype];
  s.data = guarded_new((size_t)size, in->where, 1);
  m->data = s.data.data;
  for (int64_t n = 0; n < in->rows; n++)
    for (int64_t k = 0; k < in->cols; k++)
      put_element(in->dtype, s.data.data + element_at(m, n, k), random_f32(n, k, in->cols));
  if (in->dtype == KT_F8_E4M3) add_grid(in, &s);
  if (in->factored) add_factors(in, &s);
  s.importance = some_factors(in->cols, in->where, 87, 72); /* 2^-40 .. 2^32 */
  return s;
}

static void source_end(source *s) {
  munmap(s->data.map, s->data.map_size);
  munmap(s->importance.map, s->importance.map_size);
  if (s->m.block_scale) munmap(s->grid.map, s->grid.map_size);
  if (!s->m.row_factor) return;
  munmap(s->row_factor.map, s->row_factor.map_size);
  munmap(s->col_factor.map, s->col_factor.map_size);
}

static void describe(const inputs *in) {
  static const char *const places[] = {"at end", "at start", "odd"};
  snprintf(current, sizeof current,
           "%s %s [%" PRId64 ", %" PRId64 "]%s pad %" PRId64 "%s blocks %" PRId64 " x %" PRId64
           " origin (%" PRId64 ", %" PRId64 ") %s%s",
           FORMAT_NAMES[in->format], DTYPE_NAMES[in->dtype], in->rows, in->cols,
           in->transposed ? " transposed" : "", in->pad, in->round ? " rounded" : "",
           in->block_rows, in->block_cols, in->row_origin, in->col_origin, places[in->where],
           in->factored ? " factored" : "");
}

/* ---- One level ----------------------------------------------------------- */

typedef struct result {
  guarded packed, scale, codes, codes_scale, repacked, unpacked, decoded, scratch;
  guarded repacked_scale, unpacked_scale;
  guarded row_error, row_amax, row_scale, squared;
  kt_audit audit;
} result;

/* The audit of what quantize_pack wrote, which must agree with quantize. */
static void audit(const inputs *in, const kt_matrix *m, const kt_choice *choice, result *r) {
  const size_t rows = (size_t)in->rows, elements = (size_t)(in->rows * in->cols);
  const kt_layout layout = layout_of(in->format);
  guarded codes = guarded_new(elements, in->where, 1);
  int64_t zeros = 0;
  expect_status("audit",
                kt_audit_run(&layout, m, choice, in->rows, 0, r->packed.data, r->scale.data,
                             (float *)r->row_error.data, (float *)r->row_amax.data,
                             (float *)r->row_scale.data, (double *)r->squared.data, &r->audit,
                             r->scratch.data, r->scratch.size),
                KT_OK);
  expect_status("audit_codes",
                kt_audit_codes(&layout, r->packed.data, in->rows, in->cols, (int8_t *)codes.data),
                KT_OK);
  expect_bytes("codes of the audit", codes.data, r->codes.data, elements);
  for (size_t i = 0; i < elements; i++) zeros += r->codes.data[i] == 0;
  if (r->audit.invalid || r->audit.zeros != zeros)
    fail("audit finds %" PRId64 " invalid codes and %" PRId64 " zeros, not %" PRId64,
         r->audit.invalid, r->audit.zeros, zeros);
  expect_bytes("scales by the audit's rule", r->row_scale.data, r->scale.data, 4 * rows);
  guarded_end(&codes, "codes of the audit");
}

/* Every output of one level for one matrix; they must agree among themselves. */
static result run_level(const inputs *in, const kt_matrix *m, const kt_choice *choice) {
  const kt_layout layout = layout_of(in->format);
  const size_t elements = (size_t)(in->rows * in->cols), rows = (size_t)in->rows;
  const size_t size = kt_packed_size(&layout, in->rows, in->cols);
  const placement where = in->where;
  result r = {
      .packed = guarded_new(size, where, 1),
      .scale = guarded_new(4 * rows, where, 4),
      .codes = guarded_new(elements, where, 1),
      .codes_scale = guarded_new(4 * rows, where, 4),
      .repacked = guarded_new(size, where, 1),
      .unpacked = guarded_new(elements, where, 1),
      .decoded = guarded_new(4 * elements, where, 4),
      .repacked_scale = guarded_new(4 * rows, where, 4),
      .unpacked_scale = guarded_new(4 * rows, where, 4),
      .scratch = guarded_new(kt_scratch_size(in->cols), where, 4),
      .row_error = guarded_new(4 * rows, where, 4),
      .row_amax = guarded_new(4 * rows, where, 4),
      .row_scale = guarded_new(4 * rows, where, 4),
      .squared = guarded_new(16 * rows, where, 8),
  };
  void *const scratch = r.scratch.data;
  void *const codes = r.codes.data;
  expect_status("quantize_pack",
                kt_quantize_pack(&layout, m, choice, r.packed.data, r.scale.data, scratch,
                                 r.scratch.size, NULL),
                KT_OK);
  expect_status(
      "quantize",
      kt_quantize(&layout, m, choice, codes, r.codes_scale.data, scratch, r.scratch.size, NULL),
      KT_OK);
  expect_status("pack",
                kt_pack(&layout, in->rows, in->cols, codes, r.codes_scale.data, r.repacked.data,
                        r.repacked_scale.data),
                KT_OK);
  expect_status("unpack",
                kt_unpack(&layout, in->rows, in->cols, r.packed.data, r.scale.data, r.unpacked.data,
                          r.unpacked_scale.data),
                KT_OK);
  expect_status("decode", kt_decode(m, (float *)r.decoded.data), KT_OK);
  audit(in, m, choice, &r);
  expect_bytes("pack(quantize)", r.repacked.data, r.packed.data, size);
  expect_bytes("scales of quantize", r.codes_scale.data, r.scale.data, 4 * rows);
  expect_bytes("packed scales", r.repacked_scale.data, r.scale.data, 4 * rows);
  expect_bytes("unpacked scales", r.unpacked_scale.data, r.scale.data, 4 * rows);
  expect_bytes("unpack(packed)", r.unpacked.data, r.codes.data, elements);
  return r;
}

static void result_end(result *r) {
  guarded_end(&r->packed, "packed");
  guarded_end(&r->scale, "scale");
  guarded_end(&r->codes, "codes");
  guarded_end(&r->codes_scale, "scale of quantize");
  guarded_end(&r->repacked, "pack");
  guarded_end(&r->repacked_scale, "scales of pack");
  guarded_end(&r->unpacked, "unpack");
  guarded_end(&r->unpacked_scale, "scales of unpack");
  guarded_end(&r->decoded, "decode");
  guarded_end(&r->scratch, "scratch");
  guarded_end(&r->row_error, "row_error");
  guarded_end(&r->row_amax, "row_amax");
  guarded_end(&r->row_scale, "row_scale");
  guarded_end(&r->squared, "squared");
}

static void compare(const result *truth, const result *r) {
  expect_bytes("packed", r->packed.data, truth->packed.data, truth->packed.size);
  expect_bytes("scale", r->scale.data, truth->scale.data, truth->scale.size);
  expect_bytes("decoded", r->decoded.data, truth->decoded.data, truth->decoded.size);
  expect_bytes("row_error", r->row_error.data, truth->row_error.data, truth->row_error.size);
  expect_bytes("row_amax", r->row_amax.data, truth->row_amax.data, truth->row_amax.size);
  expect_bytes("squared", r->squared.data, truth->squared.data, truth->squared.size);
  expect_bytes("audit", &r->audit, &truth->audit, sizeof r->audit);
}

static uint64_t hash = 0xcbf29ce484222325u;

static void add_hash(const guarded *g) { /* FNV-1a */
  for (size_t i = 0; i < g->size; i++) hash = (hash ^ g->data[i]) * 0x100000001b3u;
}

/* ---- Cases ----------------------------------------------------------------- */

static int use_level(int level) {
  level_name = kt_isa_name(level);
  const kt_status status = kt_isa_use(level);
  expect_status("isa_use", status, KT_OK);
  return status == KT_OK;
}

static void check_choice(const inputs *in, const source *s, const kt_choice *choice) {
  use_level(KT_ISA_SCALAR);
  result truth = run_level(in, &s->m, choice);
  add_hash(&truth.packed);
  add_hash(&truth.scale);
  add_hash(&truth.codes);
  add_hash(&truth.decoded);
  for (int i = 1; kt_isa_has(kt_isa_at(i)); i++) {
    if (!use_level(kt_isa_at(i))) continue;
    result r = run_level(in, &s->m, choice);
    compare(&truth, &r);
    result_end(&r);
  }
  level_name = kt_isa_name(KT_ISA_SCALAR);
  result_end(&truth);
}

static void check_values(const inputs *in, const source *s) {
  const float *const importance = (const float *)s->importance.data;
  const kt_choice choices[] = {{KT_RULE_AMAX, NULL},
                               {KT_RULE_SEARCH, NULL},
                               {KT_RULE_SEARCH, importance},
                               {KT_RULE_SEARCH_1, NULL}};
  for (int i = 0; i < 4; i++) {
    rule_name = RULE_NAMES[i];
    check_choice(in, s, choices + i);
  }
  rule_name = RULE_NAMES[0];
}

/* A NaN or Inf at (row, col), another behind it: the first is reported. */
static void check_nonfinite(const inputs *in, source *s) {
  const kt_choice search = {KT_RULE_SEARCH, NULL};
  static const uint32_t bits[] = {0x7f800000, 0xff800000, 0x7fc00001, 0xff810001};
  static const uint16_t halves[] = {0x7c00, 0xfc00, 0x7e01, 0xfd01};
  const uint64_t z = random64();
  const int64_t row = (int64_t)(z >> 8) % in->rows, col = (int64_t)(z >> 40) % in->cols;
  const int64_t places[2][2] = {{in->rows - 1, in->cols - 1}, {row, col}};
  for (int i = 0; i < 2; i++) {
    uint8_t *const at = s->data.data + element_at(&s->m, places[i][0], places[i][1]);
    const uint16_t half = in->dtype == KT_F16 ? halves[z % 4] : (uint16_t)(bits[z % 4] >> 16);
    if (in->dtype == KT_F32)
      memcpy(at, &bits[z % 4], 4);
    else if (in->dtype == KT_F8_E4M3)
      *at = z & 1 ? 0x7f : 0xff;
    else
      memcpy(at, &half, 2);
  }
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    if (!use_level(kt_isa_at(i))) continue;
    kt_position bad[2] = {{-1, -1}, {-1, -1}};
    guarded scratch = guarded_new(kt_scratch_size(in->cols), in->where, 4);
    const kt_layout layout = layout_of(in->format);
    guarded packed = guarded_new(kt_packed_size(&layout, in->rows, in->cols), in->where, 1);
    guarded codes = guarded_new((size_t)(in->rows * in->cols), in->where, 1);
    guarded scale = guarded_new(4 * (size_t)in->rows, in->where, 4);
    expect_status("quantize_pack with NaN",
                  kt_quantize_pack(&layout, &s->m, &search, packed.data, scale.data, scratch.data,
                                   scratch.size, &bad[0]),
                  KT_ERR_NONFINITE);
    expect_status("quantize with NaN",
                  kt_quantize(&layout, &s->m, NULL, codes.data, scale.data, scratch.data,
                              scratch.size, &bad[1]),
                  KT_ERR_NONFINITE);
    for (int n = 0; n < 2; n++)
      if (bad[n].row != row || bad[n].col != col)
        fail("NaN found at (%" PRId64 ", %" PRId64 "), not (%" PRId64 ", %" PRId64 ")", bad[n].row,
             bad[n].col, row, col);
    guarded_end(&scratch, "scratch");
    guarded_end(&packed, "packed");
    guarded_end(&codes, "codes");
    guarded_end(&scale, "scale");
  }
}

static int cases;

static void check_case(inputs in, uint64_t seed) {
  random_state = seed;
  describe(&in);
  source s = source_new(&in);
  check_values(&in, &s);
  check_nonfinite(&in, &s);
  source_end(&s);
  cases++;
}

/* Shapes in tiles; the last two are beyond one column block with more rows than a row block
 * (64 or 128), where the block sizes show. */
static void check_format(int format) {
  static const int64_t shapes[][2] = {{32, 1}, {64, 3}, {96, 2}, {160, 5}};
  const int64_t tile = format == KT_FORMAT_INT8 ? 64 : 128;
  uint64_t seed = 1000 * (uint64_t)format;
  for (int dtype = KT_BF16; dtype <= KT_F8_E4M3; dtype++)
    for (int shape = 0; shape < 4; shape++)
      for (int transposed = 0; transposed < 2; transposed++)
        for (int where = 0; where < PLACEMENTS; where++) {
          if (shape == 3 && where != AT_END) continue; /* most work */
          inputs in = {.format = format,
                       .dtype = dtype,
                       .transposed = transposed,
                       .rows = shapes[shape][0],
                       .cols = shapes[shape][1] * tile,
                       .where = (placement)where,
                       .round = (shape == 3 ? dtype + transposed : where + shape) % 2,
                       .pad = where == AT_END ? 0 : 37,
                       .block_rows = 1,
                       .block_cols = 1};
          if (dtype == KT_F8_E4M3) {
            static const int64_t blocks[][2] = {{128, 128}, {1, 32}, {7, 13}, {32, 1000}};
            in.block_rows = blocks[shape][0], in.block_cols = blocks[shape][1];
            in.row_origin = 5 * where, in.col_origin = 100 * where;
          }
          check_case(in, ++seed);
        }
  const int64_t rows = format == KT_FORMAT_INT8 ? 96 : 160;
  check_case((inputs){.format = format,
                      .dtype = KT_BF16,
                      .rows = rows,
                      .cols = 3584 + tile,
                      .block_rows = 1,
                      .block_cols = 1},
             ++seed);
  check_case((inputs){.format = format,
                      .dtype = KT_F32,
                      .rows = rows,
                      .cols = 7168 + tile,
                      .transposed = 1,
                      .where = ODD,
                      .block_rows = 1,
                      .block_cols = 1},
             ++seed);
}

/* Decoding needs no multiples: every level, rows that end within a vector. */
static void check_decode(inputs in, uint64_t seed) {
  random_state = seed;
  describe(&in);
  source s = source_new(&in);
  const size_t size = 4 * (size_t)(in.rows * in.cols);
  guarded out[KT_ISA_COUNT];
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    use_level(kt_isa_at(i));
    out[i] = guarded_new(size, in.where, 4);
    expect_status("decode", kt_decode(&s.m, (float *)out[i].data), KT_OK);
    expect_bytes("decoded", out[i].data, out[0].data, size);
  }
  add_hash(&out[0]);
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) guarded_end(&out[i], "decoded");
  source_end(&s);
  cases++;
}

static void check_ragged_decode(void) {
  static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {16, 15}, {16, 32}, {17, 33}, {16, 100}};
  uint64_t seed = 5000;
  for (int dtype = KT_BF16; dtype <= KT_F8_E4M3; dtype++)
    for (int shape = 0; shape < 6; shape++)
      for (int transposed = 0; transposed < 2; transposed++)
        for (int where = 0; where < PLACEMENTS; where++)
          check_decode((inputs){.dtype = dtype,
                                .transposed = transposed,
                                .rows = shapes[shape][0],
                                .cols = shapes[shape][1],
                                .where = (placement)where,
                                .round = shape % 2,
                                .block_rows = 5,
                                .block_cols = 6,
                                .col_origin = where},
                       ++seed);
}

/* Units of several numbers, at the edges of readable memory: every level as scalar. Blocks of
 * ggml begin and end where they may be cut. */
static void check_packed_decode(int dtype, int transposed, placement where) {
  enum { ROWS = 16, COLS = 64 };
  kt_stored_unit unit;
  expect_status("unit", kt_dtype_unit(dtype, &unit), KT_OK);
  const int ggml = dtype >= KT_Q4_0 && dtype <= KT_Q2_0;
  const int64_t cut = ggml ? unit.cols - 32 : 0, rows = ROWS / unit.rows;
  const int64_t cols = (cut + COLS + unit.cols - 1) / unit.cols;
  snprintf(current, sizeof current, "packed dtype %d transposed %d place %d", dtype, transposed,
           (int)where);
  guarded data = guarded_new((size_t)(rows * cols * unit.bytes), where, 1);
  const int mask = ggml ? 0x7b : 0xff; /* no half precision that is not finite */
  for (size_t i = 0; i < data.size; i++) data.data[i] = (uint8_t)(random64() & (uint64_t)mask);
  guarded grid = guarded_new(2 * 2 * 4, where, 4), groups = guarded_new(COLS * 4, where, 4);
  const float numbers[4] = {0.5f, 3, 1, 7};
  memcpy(grid.data, numbers, sizeof numbers);
  for (int32_t k = 0, group; k < COLS; k++) {
    group = k % 3 / 2;
    memcpy(groups.data + 4 * k, &group, 4);
  }
  const kt_matrix m = {.data = data.data,
                       .rows = ROWS,
                       .cols = COLS,
                       .row_stride = transposed ? 1 : cols,
                       .col_stride = transposed ? rows : 1,
                       .dtype = dtype,
                       .block_scale = (const float *)grid.data,
                       .scale_stride = 2,
                       .block_rows = ROWS / 2,
                       .block_cols = COLS / 2,
                       .zero_point = (const float *)grid.data,
                       .group_of_col = (const int32_t *)groups.data,
                       .first_col = cut};
  float first[ROWS * COLS];
  for (int i = 0; kt_isa_at(i) >= 0; i++) {
    if (!kt_isa_has(kt_isa_at(i)) || !use_level(kt_isa_at(i))) continue;
    guarded out = guarded_new(sizeof first, where, 4);
    expect_status("decode", kt_decode(&m, (float *)out.data), KT_OK);
    if (i == 0) memcpy(first, out.data, sizeof first);
    expect_bytes("decoded", out.data, first, sizeof first);
    guarded_end(&out, "decoded");
  }
  guarded_end(&data, "data");
  guarded_end(&grid, "grid");
  guarded_end(&groups, "groups");
  cases++;
}

static void check_packed_dtypes(void) {
  random_state = 9000;
  for (int dtype = KT_F4_E2M1; dtype < KT_DTYPE_COUNT; dtype++)
    for (int transposed = 0; transposed < 2; transposed++)
      for (int where = 0; where < PLACEMENTS; where++)
        check_packed_decode(dtype, transposed, (placement)where);
}

/* ---- Routers ------------------------------------------------------------- */

/* Some of them ties, infinities and NaN. */
static guarded random_logits(int64_t count, placement where) {
  static const uint32_t odd[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x80000000, 0x42b10000};
  guarded g = guarded_new((size_t)count * 4, where, 4);
  for (int64_t i = 0; i < count; i++) {
    const uint64_t z = random64();
    const uint32_t ordinary = float_bits((float)((int)(z % 4001) - 2000) / 128.0f);
    const uint32_t bits = z >> 58 ? ordinary : odd[(z >> 32) % 5];
    memcpy(g.data + 4 * i, &bits, 4);
  }
  return g;
}

static void check_router(kt_router r, placement where) {
  enum { TOKENS = 5 };
  static int64_t first_ids[TOKENS * KT_MAX_ROUTED];
  static float first_weights[TOKENS * KT_MAX_ROUTED];
  snprintf(current, sizeof current, "router of %d in %d, %d groups, scoring %d, place %d",
           (int)r.top_k, (int)r.experts, (int)r.groups, (int)r.scoring, (int)where);
  guarded logits = random_logits(TOKENS * (r.experts + r.sinks), where);
  guarded correction = random_logits(r.experts, where), factor = random_logits(r.experts, where);
  if (r.jitter < 0) r.correction = (const float *)correction.data;
  r.expert_factor = (const float *)factor.data;
  const size_t count = (size_t)(TOKENS * r.top_k);
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    use_level(kt_isa_at(i));
    guarded ids = guarded_new(count * 8, where, 8), weights = guarded_new(count * 4, where, 4);
    expect_status("choose_experts",
                  kt_choose_experts(&r, NULL, TOKENS, (const float *)logits.data, NULL,
                                    (int64_t *)ids.data, (float *)weights.data),
                  KT_OK);
    if (i == 0) {
      add_hash(&ids);
      add_hash(&weights);
      memcpy(first_ids, ids.data, ids.size);
      memcpy(first_weights, weights.data, weights.size);
    }
    expect_bytes("ids", ids.data, first_ids, ids.size);
    expect_bytes("weights", weights.data, first_weights, weights.size);
    guarded_end(&ids, "ids");
    guarded_end(&weights, "weights");
  }
  guarded_end(&logits, "logits");
  guarded_end(&correction, "correction");
  guarded_end(&factor, "factor");
  cases++;
}

/* Of every number of experts around whole blocks, and the largest. */
static void check_routers(void) {
  static const int64_t experts[] = {1, 6, 15, 16, 18, 40, 96, KT_MAX_ROUTED - 3};
  random_state = 11000;
  for (int size = 0; size < 8; size++)
    for (int kind = 0; kind < 16; kind++) {
      const int64_t e = experts[size], groups = kind & 4 && e % 3 == 0 ? 3 : 1;
      const int64_t keep = groups == 3 ? 2 : 1, most = e / groups * keep;
      const int64_t some = (most + 3) / 4 % 9 + 1;
      const int scoring = kind % 4 % 3, mixed = kind == 12;
      const kt_router r = {.experts = e,
                           .sinks = scoring != KT_SOFTMAX && kind & 8 ? 3 : 0,
                           .top_k = most < some || (kind == 5 && e < 100) ? most : some,
                           .scoring = mixed ? KT_SOFTMAX : scoring,
                           .by_logits = kind == 7,
                           .groups = mixed ? 1 : groups,
                           .keep = mixed ? 1 : keep,
                           .group_score = 1 + kind % 2,
                           .renormalise = !mixed && kind % 5 != 0,
                           .masked = kind % 2 ? 0.0f : -INFINITY,
                           .jitter = mixed ? 0.1f : -1.0f,
                           .p_norm = kind & 8 ? 2.0f : 1.0f,
                           .epsilon = 1e-20f,
                           .factor = 2.5f};
      check_router(r, (placement)((size + kind) % PLACEMENTS));
    }
}

/* The functions without a matrix, and refusals that must not touch memory. */
static void check_rest(void) {
  kt_cpu cpu;
  kt_cpu_detect(&cpu);
  snprintf(current, sizeof current, "arguments");
  level_name = "";
  if (cpu.avx512 > kt_isa_has(KT_ISA_AVX512) || !kt_isa_has(kt_isa_available())) fail("levels");
  const kt_layout int8 = layout_of(KT_FORMAT_INT8), int4 = layout_of(KT_FORMAT_INT4);
  const kt_layout unknown = layout_of(KT_FORMAT_BF16), bf16 = {KT_FORMAT_BF16, 0, KT_SCALE_NONE};
  if (kt_packed_size(&int8, 32, 64) != 2048 || kt_packed_size(&int4, 32, 128) != 2048 ||
      kt_packed_size(&int4, 32, 64) || kt_packed_size(&unknown, 32, 128) ||
      kt_packed_size(&int8, (int64_t)1 << 40, (int64_t)1 << 40))
    fail("packed sizes");
  uint8_t byte = 0;
  float row = 0;
  kt_matrix m = {&byte, 32, 128, 128, 1, .dtype = KT_F32};
  expect_status("pack", kt_pack(&int8, 32, 64, NULL, NULL, &byte, NULL), KT_ERR_ARGUMENT);
  expect_status("pack", kt_pack(&int8, 31, 64, &byte, NULL, &byte, NULL), KT_ERR_SHAPE);
  expect_status("pack", kt_pack(&int8, 32, 64, &byte, &row, &byte, NULL), KT_ERR_ARGUMENT);
  expect_status("unpack", kt_unpack(&unknown, 32, 64, &byte, NULL, &byte, NULL), KT_ERR_ARGUMENT);
  expect_status("decode", kt_decode(NULL, NULL), KT_ERR_ARGUMENT);
  expect_status("quantize", kt_quantize(&bf16, &m, NULL, &byte, &row, &byte, 1, NULL),
                KT_ERR_UNSUPPORTED);
  expect_status(
      "audit",
      kt_audit_run(&int4, NULL, NULL, 32, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0),
      KT_ERR_ARGUMENT);
  expect_status("audit_codes", kt_audit_codes(&int8, &byte, 32, 32, (int8_t *)&byte), KT_ERR_SHAPE);
  expect_status("audit_codes", kt_audit_codes(&bf16, &byte, 32, 32, (int8_t *)&byte),
                KT_ERR_UNSUPPORTED);
  const kt_router router = {.experts = 4, .top_k = 1, .groups = 3, .keep = 1, .group_score = 1};
  int64_t id = 0;
  expect_status("choose_experts", kt_choose_experts(&router, NULL, 1, &row, NULL, &id, &row),
                KT_ERR_ARGUMENT);
  expect_status("choose_experts", kt_choose_experts(NULL, NULL, 1, &row, NULL, &id, &row),
                KT_ERR_ARGUMENT);
  expect_status("isa_use", kt_isa_use(KT_ISA_COUNT), KT_ERR_ARGUMENT);
}

int main(void) {
  signal(SIGSEGV, on_fault);
  signal(SIGBUS, on_fault);
  printf("levels:");
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) printf(" %s", kt_isa_name(kt_isa_at(i)));
  printf("\n");
  if (kt_isa_active() < 0) {
    printf("KTCONV_ISA: %s\n", kt_strerror(-kt_isa_active()));
    return 2;
  }
  check_rest();
  check_format(KT_FORMAT_INT8);
  check_format(KT_FORMAT_INT4);
  check_ragged_decode();
  check_packed_dtypes();
  check_routers();
  snprintf(current, sizeof current, "all cases");
  level_name = kt_isa_name(KT_ISA_SCALAR);
  if (hash != EXPECTED_HASH) fail("hash is %016" PRIx64 ", not %016" PRIx64, hash, EXPECTED_HASH);
  printf("%d cases, %d failures, hash %016" PRIx64 "\n", cases, failures, hash);
  return failures != 0;
}
