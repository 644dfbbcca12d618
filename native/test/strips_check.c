/* strips_check.c - strips for fine-tuning (train/strips.h), of every weight format on every level.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/strips_check.c native/test/amx_emulator.c \
 *      -lm -pthread && ./a.out
 *
 * Random bytes, so every code of every format, between unreadable pages. Scalar is compared with
 * plain loops over what kt_unpack returns, other levels with scalar, bit by bit; sums within a
 * bound. With the emulator linked in, AMX runs on any x86-64 CPU with AVX-512 BF16. Exit code: 0
 * all passed, 1 something differed, 2 no memory. */
#define _GNU_SOURCE
#include "../src/cpu.h"
#include "../src/format/scales.h"
#include "../src/train/strips.h"
#include "layers.h"

#include <float.h>
#include <stdio.h>

static void expect_same(const char *what, const void *found, const void *expected, size_t size) {
  const uint8_t *const a = found, *const b = expected;
  if (memcmp(a, b, size) == 0) return;
  size_t at = 0;
  while (a[at] == b[at]) at++;
  printf("FAILED: %s, level %s: byte %zu of %zu is %d instead of %d\n", what,
         kt_isa_name(kt_isa_active()), at, size, a[at], b[at]);
  failures++;
}

/* ---- Weights ---------------------------------------------------------------- */

typedef struct weights {
  kt_weight packed;
  const uint8_t *codes; /* plain */
  const void *scale;
} weights;

/* Scales of every size that the dtype has: zeros and the outermost exponents too. */
static void draw_any_scales(int32_t dtype, void *scale, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (dtype == KT_SCALE_F32) ((float *)scale)[i] = ldexpf(unit(), (int)(draw() % 60) - 40);
    if (dtype == KT_SCALE_BF16) ((uint16_t *)scale)[i] = (uint16_t)(draw() % 0x7f80);
    if (dtype == KT_SCALE_UE8M0) ((uint8_t *)scale)[i] = (uint8_t)(draw() % 255);
  }
}

static weights make_weights(const kt_layout *layout, int64_t rows, int64_t cols) {
  const size_t size = kt_packed_size(layout, rows, cols),
               scales = kt_scale_size(layout, rows, cols);
  uint8_t *const packed = held(size);
  uint8_t *const plain = held((size_t)(rows * cols) * 2);
  void *const scale = scales ? held(scales) : NULL;
  void *const plain_scale = scales ? held(scales) : NULL;
  const int32_t dtype = layout->scale_dtype;
  for (size_t i = 0; i < size; i++) {
    packed[i] = (uint8_t)draw();
    const int of_e4m3 = layout->format == KT_FORMAT_NVFP4 || layout->format == KT_FORMAT_MXFP8;
    if (of_e4m3 && (packed[i] & 0x7f) == 0x7f) packed[i] ^= 0x40; /* NaN */
  }
  if (scales) {
    draw_any_scales(dtype, plain_scale, kt_scale_count(layout, rows, cols));
    if (kt_scales_pack(layout, rows, cols, plain_scale, scale)) failures++;
  }
  if (kt_unpack(layout, rows, cols, packed, NULL, plain, NULL)) failures++;
  return (weights){{packed, scale, rows, cols, *layout}, plain, plain_scale};
}

static float worth(const weights *w, int64_t n, int64_t k) {
  return scale_value(&w->packed.layout, w->scale, w->packed.cols, n, k);
}

/* A strip [32][cols] from where its tiles have it. */
static uint16_t element(const uint8_t *strip, int64_t i, int64_t k) {
  uint16_t bits;
  memcpy(&bits, strip + k / 32 * 2048 + i / 16 * 1024 + k % 32 / 2 * 64 + i % 16 * 4 + k % 2 * 2,
         2);
  return bits;
}

/* Bits of binary32 numbers that bf16 has too. */
static uint16_t exact_bits(float value) {
  if (isnan(value)) return (uint16_t)(signbit(value) ? 0xffc0 : 0x7fc0);
  if (bits_of(value) & 0xffff) failures++;
  return (uint16_t)(bits_of(value) >> 16);
}

static void check_scalar_strip(const weights *w, int64_t column, const uint8_t *strip) {
  const kt_layout *const layout = &w->packed.layout;
  for (int64_t n = 0; n < w->packed.rows; n++)
    for (int64_t i = 0; i < KT_STRIP; i++) {
      const int64_t at = n * w->packed.cols + column + i;
      float value = code_value(layout, w->codes, at);
      if (layout->scale_dtype == KT_SCALE_UE8M0) value *= worth(w, n, column + i);
      if (layout->format == KT_FORMAT_MXFP8 && fabsf(value) < FLT_MIN) value *= 0.0f;
      const int plain_bf16 = layout->format == KT_FORMAT_BF16;
      const uint16_t expected =
          plain_bf16 ? ((const uint16_t *)(const void *)w->codes)[at] : exact_bits(value);
      if (element(strip, i, n) == expected) continue;
      printf("FAILED: format %d, row %d, column %d: %#x instead of %#x\n", layout->format, (int)n,
             (int)(column + i), element(strip, i, n), expected);
      failures++;
      return;
    }
}

static void check_fold_scales(const weights *w, int64_t column) {
  float *const scale = held((size_t)w->packed.rows * sizeof *scale);
  kt_fold_scales(&w->packed, column, scale);
  for (int64_t n = 0; n < w->packed.rows; n++)
    if (bits_of(scale[n]) != bits_of(worth(w, n, column))) {
      printf("FAILED: scale of row %d, column %d is %g\n", (int)n, (int)column, (double)scale[n]);
      failures++;
      return;
    }
}

/* All columns of a matrix on every level. */
static void check_weights(const kt_layout *layout, int64_t rows, int64_t cols) {
  const weights w = make_weights(layout, rows, cols);
  const kt_weight_format *const format = kt_format_of(layout);
  const size_t size = (size_t)rows * 64;
  uint8_t *const scalar = held(size), *const strip = held(size);
  for (int64_t column = 0; column < cols; column += KT_STRIP) {
    memset(scalar, 0xa5, size);
    format->transpose[KT_ISA_SCALAR](&w.packed, column, scalar);
    check_scalar_strip(&w, column, scalar);
    for (int i = 0, level; (level = kt_isa_at(i)) >= 0; i++) {
      if (kt_isa_use(level)) continue;
      memset(strip, 0xa5, size);
      kt_format_transpose(format)(&w.packed, column, strip);
      expect_same("strip of a format", strip, scalar, size);
    }
  }
  for (int64_t column = 0; kt_scales_to_fold(layout) && column < cols; column += 96)
    check_fold_scales(&w, column);
  release_all();
}

/* Every layout that there is. */
static void check_formats(void) {
  static const int32_t groups[] = {0, 32, 64, 128};
  for (int32_t format = 0; format <= KT_FORMAT_MXFP8; format++)
    for (int32_t i = 0; i < 4; i++)
      for (int32_t dtype = KT_SCALE_NONE; dtype <= KT_SCALE_UE8M0; dtype++) {
        const kt_layout layout = {format, groups[i], dtype};
        if (!kt_format_of(&layout)) continue;
        if (kt_scales_to_fold(&layout) != (dtype == KT_SCALE_F32 || dtype == KT_SCALE_BF16)) {
          printf("FAILED: scales of format %d, dtype %d\n", format, dtype);
          failures++;
        }
        check_weights(&layout, 32, 128);
        check_weights(&layout, 96, 384);
        if (format == KT_FORMAT_INT8 || format == KT_FORMAT_INT4) {
          check_weights(&layout, 160, 256); /* the last block of rows is not full */
          check_weights(&layout, 32, 3584 + 128);
        }
      }
}

/* ---- Plain matrices ---------------------------------------------------------- */

static kt_plain make_plain(int dtype, int64_t rows, int64_t cols, int at_end) {
  const size_t size = dtype == KT_F32 ? 4 : 2;
  void *const data = held_at((size_t)(rows * cols) * size, at_end);
  for (int64_t i = 0; i < rows * cols; i++) {
    if (dtype == KT_BF16) ((uint16_t *)data)[i] = (uint16_t)draw();
    if (dtype == KT_F32) ((uint32_t *)data)[i] = (uint32_t)draw() | (draw() % 16 ? 0 : 0x7f800000);
  }
  return (kt_plain){data, rows, cols, dtype};
}

static uint16_t plain_bits(const kt_plain *m, int64_t row, int64_t col) {
  if (row < 0 || row >= m->rows || col < 0 || col >= m->cols) return 0;
  if (m->dtype == KT_BF16) return ((const uint16_t *)m->data)[row * m->cols + col];
  return nearest_bf16(((const float *)m->data)[row * m->cols + col]);
}

static void check_plain_strip(const kt_plain *m, int by_columns, int64_t first, int64_t shift,
                              int64_t count, const uint8_t *strip) {
  for (int64_t i = 0; i < KT_STRIP; i++)
    for (int64_t k = 0; k < count; k++) {
      const int64_t row = by_columns ? k - shift : first + i;
      const int64_t col = by_columns ? first + i : k - shift;
      if (element(strip, i, k) == plain_bits(m, row, col)) continue;
      printf("FAILED: plain [%d, %d], row %d, column %d of a strip from %d, shifted by %d\n",
             (int)m->rows, (int)m->cols, (int)i, (int)k, (int)first, (int)shift);
      failures++;
      return;
    }
}

static void check_plain(int dtype, int64_t rows, int64_t cols, int64_t first, int64_t shift,
                        int64_t count) {
  const size_t size = (size_t)count * 64;
  uint8_t *const scalar = held(size), *const strip = held(size);
  for (int at_end = 0; at_end < 2; at_end++)
    for (int by_columns = 0; by_columns < 2; by_columns++) {
      const kt_plain m = make_plain(dtype, rows, cols, at_end);
      const kt_strips *const s = &kt_strips_scalar;
      memset(scalar, 0xa5, size);
      (by_columns ? s->columns : s->rows)(&m, first, shift, count, scalar);
      check_plain_strip(&m, by_columns, first, shift, count, scalar);
      for (int i = 0, level; (level = kt_isa_at(i)) >= 0; i++) {
        if (kt_isa_use(level)) continue;
        const kt_strips *const best = KT_CELL(kt_strips_of);
        memset(strip, 0xa5, size);
        (by_columns ? best->columns : best->rows)(&m, first, shift, count, strip);
        expect_same("strip of a plain matrix", strip, scalar, size);
      }
    }
  release_all();
}

static void check_plains(void) {
  static const int dtypes[] = {KT_BF16, KT_F32};
  for (int i = 0; i < 2; i++) {
    check_plain(dtypes[i], 1, 1, 0, 0, 32);
    check_plain(dtypes[i], 8, 96, 0, 0, 96);   /* A of a rank of 8 */
    check_plain(dtypes[i], 96, 8, 32, 16, 64); /* B, between others */
    check_plain(dtypes[i], 96, 8, 0, 0, 128);  /* columns: ends within */
    check_plain(dtypes[i], 33, 67, 32, 0, 96); /* a strip of one row */
    check_plain(dtypes[i], 67, 33, 32, 5, 96);
    check_plain(dtypes[i], 40, 50, 7, 45, 64); /* cut off at the end of the strip */
    check_plain(dtypes[i], 50, 40, 96, 3, 64); /* nothing of it */
    check_plain(dtypes[i], 17, 31, 3, 31, 64);
  }
}

/* ---- Products with scales, and sums ------------------------------------------- */

static void check_fold(void) {
  static const float scales[] = {1.0f, 0.00417f, -3.3e20f, 1e-30f, 0.0f, 1e-44f, 3e38f};
  enum { ALL = 65536 };
  uint16_t *const row = held(ALL * sizeof *row), *const out = held(ALL * sizeof *out);
  float *const scale = held(ALL * sizeof *scale);
  uint16_t *const scalar = held(ALL * sizeof *scalar);
  for (int i = 0; i < ALL; i++) {
    row[i] = (uint16_t)i;
    scale[i] = scales[draw() % (sizeof scales / sizeof *scales)] * (i % 2 ? 1.0f : 0.5f + unit());
  }
  kt_strips_scalar.fold(row, scale, ALL, scalar);
  for (int i = 0; i < ALL; i++) {
    const float value = wide(row[i]) * scale[i];
    const uint16_t tiny = signbit(value) ? 0x8000 : 0;
    if (isnan(value) ? !isnan(wide(scalar[i]))
                     : scalar[i] != (fabsf(value) < 0x1p-126f ? tiny : nearest_bf16(value))) {
      printf("FAILED: %#x * %g becomes %#x\n", i, (double)scale[i], scalar[i]);
      failures++;
      break;
    }
  }
  for (int i = 0, level; (level = kt_isa_at(i)) >= 0; i++) {
    if (kt_isa_use(level)) continue;
    KT_CELL(kt_strips_of)->fold(row, scale, ALL, out);
    expect_same("fold", out, scalar, ALL * sizeof *out);
    memcpy(out, row, ALL * sizeof *out);
    KT_CELL(kt_strips_of)->fold(out, scale, 32, out);
    expect_same("fold in place", out, scalar, 32 * sizeof *out);
  }
  release_all();
}

/* Random bf16 numbers below 1. */
static void draw_bf16(uint8_t *to, size_t size) {
  for (size_t i = 0; i < size; i += 2) {
    const uint16_t bits = nearest_bf16(unit());
    memcpy(to + i, &bits, 2);
  }
}

/* A product of `before` columns, to which that of the others is added, against one of all. */
static void check_adding(int64_t cols, int64_t before, int64_t tokens) {
  const kt_layout layout = {KT_FORMAT_BF16, 0, KT_SCALE_NONE};
  const int64_t stride = cols * 2 + 64;
  const size_t count = (size_t)tokens * KT_STRIP, size = count * sizeof(float);
  uint8_t *const codes = held((size_t)cols * 64);
  uint8_t *const x = held((size_t)(tokens * stride));
  uint8_t *const panel = held(KT_PANEL_SIZE);
  float *const whole = held(size), *const sum = held(size);
  double bound = 0;
  draw_bf16(codes, (size_t)cols * 64);
  draw_bf16(x, (size_t)(tokens * stride));
  const kt_weight all_cols = {codes, NULL, KT_STRIP, cols, layout},
                  first = {codes, NULL, KT_STRIP, before, layout},
                  last = {codes + before * 64, NULL, KT_STRIP, cols - before, layout};
  for (int i = 0, level; (level = kt_isa_at(i)) >= 0; i++) {
    if (kt_isa_use(level)) continue;
    kt_product_fn *const product = kt_format_product(kt_format_of(&layout));
    product(&all_cols, 0, 1, x, stride, tokens, whole, panel);
    product(&first, 0, 1, x, stride, tokens, sum, panel);
    kt_bf16_adding_product()(&last, 0, 1, x + before * 2, stride, tokens, sum, panel);
    for (size_t j = 0; j < count; j++)
      if (!(fabs((double)sum[j] - (double)whole[j]) <= 1e-6 * (double)cols)) failures++, bound = 1;
    /* One chain of sums, whose place of interruption does not matter. */
#if KT_X86
    if (level == KT_ISA_AVX512) expect_same("sums in two steps", sum, whole, size);
#endif
  }
  if (bound != 0) printf("FAILED: sums of %d columns, %d tokens\n", (int)cols, (int)tokens);
  release_all();
}

static void check_sums(void) {
  static const int64_t tokens[] = {1, 2, 5, 8, 12, 13, 25, 33, 35, 96};
  for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
    check_adding(96, 32, tokens[i]);
    check_adding(416, 288, tokens[i]);
  }
  check_adding(4096 + 32, 2048 + 64, 13);
}

/* ---- Split rows ----------------------------------------------------------------- */

/* One row, of numbers that are all below 2^`exponent`, but for `odd` among them. */
static void check_split_row(int exponent, float odd) {
  enum { N = 320 };
  uint16_t *const row = held(N * sizeof *row);
  float *const factor = held(N * sizeof *factor);
  int8_t *const high = held(N), *const low = held(N);
  int8_t *const other_high = held(N), *const other_low = held(N);
  double amax = 0;
  for (int i = 0; i < N; i++) {
    row[i] = nearest_bf16(i == 77 && odd != 0.0f ? odd : ldexpf(unit(), exponent));
    factor[i] = unit();
    amax = fmax(amax, fabs((double)(wide(row[i]) * factor[i])));
  }
  const float scale = kt_strips_scalar.split(row, factor, N, high, low);
  const int finite = isfinite(odd), zero = finite && amax / 32639 < 0x1p-126;
  if (finite ? zero ? scale != 0.0f : fabs((double)scale * 32639 / amax - 1) > 1e-6 : !isnan(scale))
    printf("FAILED: scale %g of a split row\n", (double)scale), failures++;
  for (int i = 0; i < N; i++) {
    const double value = (double)(wide(row[i]) * factor[i]);
    const double expected = finite && !zero ? value / (double)scale : 0.0;
    if (fabs(256.0 * high[i] + low[i] - expected) <= (expected == 0.0 ? 0.0 : 0.51)) continue;
    printf("FAILED: number %d of a split row is %d, %d instead of %g\n", i, high[i], low[i],
           expected);
    failures++;
    break;
  }
  for (int i = 0, level; (level = kt_isa_at(i)) >= 0; i++) {
    if (kt_isa_use(level)) continue;
    const float other = KT_CELL(kt_strips_of)->split(row, factor, N, other_high, other_low);
    if (isnan(scale) ? !isnan(other) : bits_of(other) != bits_of(scale)) failures++;
    expect_same("high codes", other_high, high, N);
    expect_same("low codes", other_low, low, N);
  }
  release_all();
}

static void check_split(void) {
  for (int exponent = -140; exponent < 120; exponent += 13) check_split_row(exponent, 0.0f);
  check_split_row(0, 1000.0f);
  check_split_row(0, NAN);
  check_split_row(0, -INFINITY);
  check_split_row(-200, 0.0f);
}

/* ---- Transposed products --------------------------------------------------------- */

/* Weights of moderate size: sums that do not overflow. */
static weights make_moderate(const kt_layout *layout, int64_t rows, int64_t cols) {
  weights w = make_weights(layout, rows, cols);
  const size_t size = kt_packed_size(layout, rows, cols);
  uint8_t *const packed = (uint8_t *)(uintptr_t)w.packed.codes;
  if (layout->format == KT_FORMAT_BF16) draw_bf16(packed, size);
  for (size_t i = 0; layout->format == KT_FORMAT_FP8 && i < size; i++)
    if ((packed[i] & 0x7f) == 0x7f) packed[i] ^= 0x40;
  for (int64_t i = 0; w.scale && i < kt_scale_count(layout, rows, cols); i++) {
    const float value = 1.0f + 0.5f * unit();
    if (layout->scale_dtype == KT_SCALE_F32) ((float *)(uintptr_t)w.scale)[i] = value;
    if (layout->scale_dtype == KT_SCALE_BF16)
      ((uint16_t *)(uintptr_t)w.scale)[i] = nearest_bf16(value);
    if (layout->scale_dtype == KT_SCALE_UE8M0)
      ((uint8_t *)(uintptr_t)w.scale)[i] = (uint8_t)(125 + draw() % 4);
  }
  if (w.scale && kt_scales_pack(layout, rows, cols, w.scale, (void *)(uintptr_t)w.packed.scale))
    failures++;
  if (kt_unpack(layout, rows, cols, packed, NULL, (void *)(uintptr_t)w.codes, NULL)) failures++;
  return w;
}

/* A product in memory of its own. */
typedef struct transposed_trial {
  weights w[2];
  int64_t matrices, rows, cols, tokens, stride;
  uint16_t *x;      /* [tokens][matrices * rows] */
  uint8_t *given;   /* as the product reads them */
  float *out, *sum; /* of one strip, and of all */
  kt_transposed job;
} transposed_trial;

static double weight_value(const transposed_trial *t, int64_t k, int64_t column) {
  const weights *const w = t->w + k / t->rows;
  const kt_layout *const layout = &w->packed.layout;
  const int64_t n = k % t->rows;
  const double code = (double)code_value(layout, w->codes, n * t->cols + column);
  const int folded = !layout->group && !kt_format_of(layout)->splits;
  if (folded || layout->scale_dtype == KT_SCALE_NONE) return code;
  return code * (double)worth(w, n, column);
}

/* Strips of columns first .. end - 1 of the first `tokens` rows, into t->sum. */
static void transposed_strips(transposed_trial *t, int64_t first, int64_t end, int64_t tokens) {
  kt_transposed job = t->job;
  kt_transposed_fn *const product = kt_format_transposed(kt_format_of(&t->w[0].packed.layout));
  job.column = first, job.end = end, job.tokens = tokens;
  for (int64_t column = first; column < end; column += KT_STRIP) {
    product(&job, t->out);
    for (int64_t i = 0; i < tokens; i++)
      memcpy(t->sum + i * t->cols + column, t->out + i * KT_STRIP, KT_STRIP * sizeof(float));
  }
}

/* The same with sums in two parts. */
static void transposed_in_parts(transposed_trial *t) {
  kt_transposed_fn *const product = kt_format_transposed(kt_format_of(&t->w[0].packed.layout));
  for (int64_t column = 0; column < t->cols; column += KT_STRIP) {
    for (int part = 0; part < 2; part++) {
      kt_transposed job = t->job;
      job.column = column, job.end = column + KT_STRIP, job.tokens = t->tokens;
      if (part == 0)
        job.to = job.to / 2 / 64 * 64;
      else
        job.from = job.to / 2 / 64 * 64, job.adds = 1;
      product(&job, t->out);
    }
    for (int64_t i = 0; i < t->tokens; i++)
      memcpy(t->sum + i * t->cols + column, t->out + i * KT_STRIP, KT_STRIP * sizeof(float));
  }
}

static void make_rows(transposed_trial *t) {
  const int64_t numbers = t->matrices * t->rows;
  float *const factor = held((size_t)numbers * sizeof *factor);
  draw_bf16((uint8_t *)t->x, (size_t)(t->tokens * numbers) * 2);
  const int splits = kt_format_of(&t->w[0].packed.layout)->splits;
  for (int64_t m = 0; splits && m < t->matrices; m++)
    kt_fold_scales(&t->w[m].packed, 0, factor + m * t->rows);
  for (int64_t i = 0; i < t->tokens; i++) {
    uint8_t *const row = t->given + i * t->stride;
    const uint16_t *const from = t->x + i * numbers;
    if (splits)
      *kt_split_scale(row, numbers) =
          kt_strips_scalar.split(from, factor, numbers, (int8_t *)row, (int8_t *)row + numbers);
    else
      memcpy(row, from, (size_t)numbers * 2);
  }
}

/* Of rounding: of scaled codes to bf16, or none; of split rows; sums in binary32. */
static void check_sums_of(const transposed_trial *t) {
  const kt_layout *const layout = &t->w[0].packed.layout;
  const int rounds = layout->group && layout->scale_dtype != KT_SCALE_UE8M0;
  const double bound = rounds ? 4e-3 : kt_format_of(layout)->splits ? 1e-4 : 1e-5;
  const int64_t numbers = t->matrices * t->rows;
  double wrong = 0, squares = 0, *const column = malloc((size_t)numbers * sizeof *column);
  for (int64_t c = 0; c < t->cols; c++) {
    for (int64_t k = 0; k < numbers; k++) column[k] = weight_value(t, k, c);
    for (int64_t i = 0; i < t->tokens; i++) {
      double sum = 0;
      for (int64_t k = 0; k < numbers; k++) sum += (double)wide(t->x[i * numbers + k]) * column[k];
      wrong += pow((double)t->sum[i * t->cols + c] - sum, 2);
      squares += sum * sum;
    }
  }
  free(column);
  if (sqrt(wrong / squares) <= bound) return;
  printf("FAILED: transposed product of format %d, groups of %d, scales %d, %d x [%d, %d], %d "
         "tokens: %g\n",
         layout->format, layout->group, layout->scale_dtype, (int)t->matrices, (int)t->rows,
         (int)t->cols, (int)t->tokens, sqrt(wrong / squares));
  failures++;
}

static void check_transposed(const kt_layout *layout, int64_t matrices, int64_t rows, int64_t cols,
                             int64_t tokens) {
  const int64_t numbers = matrices * rows, stride = 2 * numbers + 64;
  transposed_trial t = {.matrices = matrices, .rows = rows, .cols = cols, .tokens = tokens};
  for (int64_t m = 0; m < matrices; m++) t.w[m] = make_moderate(layout, rows, cols);
  t.stride = stride;
  t.x = held((size_t)(tokens * numbers) * 2);
  t.given = held((size_t)(tokens * stride));
  t.out = held(KT_TRANSPOSED_ROWS * KT_STRIP * sizeof(float));
  t.sum = held((size_t)(tokens * cols) * sizeof(float));
  t.job = (kt_transposed){.matrices = matrices, .to = numbers, .rows = t.given, .stride = stride};
  for (int64_t m = 0; m < matrices; m++) t.job.w[m] = t.w[m].packed;
  t.job.ring = held(2 * KT_TRANSPOSED_CHUNK);
  t.job.sums = held(KT_TRANSPOSED_ROWS * 2 * KT_STRIP * sizeof(int32_t));
  t.job.squares = held((size_t)(2 * numbers / KT_STRIP) * sizeof(kt_packed_square));
  float *const whole = held((size_t)(tokens * cols) * sizeof(float));
  make_rows(&t);
  transposed_strips(&t, 0, cols, tokens);
  check_sums_of(&t);
  /* Neither other columns nor other tokens matter for the bits of an element. */
  memcpy(whole, t.sum, (size_t)(tokens * cols) * sizeof(float));
  for (int64_t column = 0; column < cols; column += KT_STRIP)
    transposed_strips(&t, column, column + KT_STRIP, tokens);
  expect_same("strips one by one", t.sum, whole, (size_t)(tokens * cols) * sizeof(float));
  transposed_strips(&t, 0, cols, 1);
  expect_same("one token", t.sum, whole, (size_t)(tokens * cols) * sizeof(float));
  if (numbers >= 128) {
    transposed_in_parts(&t);
    check_sums_of(&t);
  }
  release_all();
}

/* Every format that has such products, at the level that has them. */
static void check_all_transposed(void) {
  static const int64_t tokens[] = {1, 16, 17, 35, 64, 100, 192};
  static const int32_t groups[] = {0, 32, 64, 128};
  for (int32_t format = 0; format <= KT_FORMAT_MXFP8; format++)
    for (int32_t i = 0; i < 4; i++)
      for (int32_t dtype = KT_SCALE_NONE; dtype <= KT_SCALE_UE8M0; dtype++) {
        const kt_layout layout = {format, groups[i], dtype};
        if (!kt_format_of(&layout) || !kt_format_transposed(kt_format_of(&layout))) continue;
        for (size_t j = 0; j < sizeof tokens / sizeof *tokens; j++)
          check_transposed(&layout, 1 + (int64_t)j % 2, 128, 128, tokens[j]);
        check_transposed(&layout, 2, 192, 128, 33);
        check_transposed(&layout, 1, 1216, 128, 5);
        check_transposed(&layout, 1, 64, 3584 + 256, 3);
      }
}

int main(void) {
  assume_amx();
  check_formats();
  check_plains();
  check_fold();
  check_sums();
  check_split();
#if KT_X86
  if (kt_isa_use(KT_ISA_AMX) == KT_OK) check_all_transposed();
#endif
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
