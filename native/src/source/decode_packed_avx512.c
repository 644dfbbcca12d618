/* Packed integers, FP4 and FP6 on AVX-512, 16 numbers at a time. Bit-equal to decode_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "decode.h"
#include "round_bf16_avx512.h"

#include <string.h>

enum { LANES = 16, SIGNED = -8 /* in place of a width: signed bytes */ };

/* Where 16 numbers of `bits` each are in a stream: the 16-bit words that lane i needs, and how
 * far to the left. */
typedef struct stream {
  __m512i words, shift, mask;
  __mmask16 bytes; /* that 16 numbers take */
} stream;

KT_INLINE stream stream_of(int bits) {
  uint32_t words[LANES], shift[LANES];
  for (int i = 0; i < LANES; i++) {
    const uint32_t first = (uint32_t)(i * bits / 16);
    words[i] = first | (first + 1) << 16;
    shift[i] = (uint32_t)(i * bits % 16);
  }
  return (stream){_mm512_loadu_si512(words), _mm512_loadu_si512(shift),
                  _mm512_set1_epi32((1 << bits) - 1), (__mmask16)((1u << 2 * bits) - 1)};
}

/* In the lowest bits of each lane; other bits follow. */
KT_INLINE __m512i codes16(__m128i data, stream s) {
  const __m512i pairs = _mm512_permutexvar_epi16(s.words, _mm512_castsi128_si512(data));
  return _mm512_srlv_epi32(pairs, s.shift);
}

/* What numbers of 4 bits mean, or of 6 (E2M3). */
typedef enum meaning { UNSIGNED, E2M1, E0M3, TWOS_COMPLEMENT, E2M3 } meaning;

KT_INLINE __m512 values_of(meaning of) {
  if (of == E2M1)
    return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  if (of == E0M3)
    return _mm512_setr_ps(0, 0.25f, 0.5f, 0.75f, 1, 1.25f, 1.5f, 1.75f, -0.0f, -0.25f, -0.5f,
                          -0.75f, -1, -1.25f, -1.5f, -1.75f);
  return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
}

/* Of each index of 4 bits; the lowest `bits` of them are a code. */
KT_INLINE __m512 values_of_4_bits(int bits, meaning of) {
  const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  if (of) return values_of(of);
  return _mm512_cvtepi32_ps(_mm512_and_si512(index, _mm512_set1_epi32((1 << bits) - 1)));
}

/* Of codes in the lowest 6 bits of each lane: 32 magnitudes, and a sign. */
KT_INLINE __m512 e2m3_values(__m512i codes) {
  const __m512 to_2 = _mm512_setr_ps(0, 0.125f, 0.25f, 0.375f, 0.5f, 0.625f, 0.75f, 0.875f, 1,
                                     1.125f, 1.25f, 1.375f, 1.5f, 1.625f, 1.75f, 1.875f);
  const __m512 from_2 = _mm512_setr_ps(2, 2.25f, 2.5f, 2.75f, 3, 3.25f, 3.5f, 3.75f, 4, 4.5f, 5,
                                       5.5f, 6, 6.5f, 7, 7.5f);
  const __m512 magnitude = _mm512_permutex2var_ps(to_2, codes, from_2);
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(codes, 26), _mm512_set1_epi32(INT32_MIN));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), sign));
}

KT_INLINE __m512 values16(__m128i data, int bits, meaning of, stream s) {
  if (bits == SIGNED) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(data));
  const __m512i codes = codes16(data, s);
  if (of == E2M3) return e2m3_values(codes);
  if (of) return _mm512_permutexvar_ps(codes, values_of(of));
  return _mm512_cvtepi32_ps(_mm512_and_si512(codes, s.mask));
}

/* ---- Scales ---------------------------------------------------------------- */

/* Whether all columns of a vector have the same scale. */
KT_INLINE int is_aligned(const kt_matrix *m) {
  return !m->group_of_col && m->block_cols % LANES == 0 && m->col_origin % LANES == 0;
}

/* Of columns k..k+15, from a row of the grid. */
KT_INLINE __m512 grid16(const kt_matrix *m, const float *row, int64_t k) {
  float each[LANES];
  if (m->group_of_col)
    for (int i = 0; i < LANES; i++) each[i] = row[m->group_of_col[k + i]];
  else
    for (int i = 0; i < LANES; i++) each[i] = row[kt_grid_col(m, k + i)];
  return _mm512_loadu_ps(each);
}

KT_INLINE __m512 scaled(__m512 value, __m512 zero, __m512 scale, int rounded) {
  value = _mm512_mul_ps(_mm512_sub_ps(value, zero), scale);
  return rounded ? kt_round_bf16(value) : value;
}

/* ---- Rows that lie contiguously -------------------------------------------- */

/* The bytes with columns k..k+15. */
KT_INLINE __m128i row_data(const uint8_t *row, int64_t k, int bits, stream s) {
  return _mm_maskz_loadu_epi8(s.bytes, row + (bits == SIGNED ? k : k * bits / 8));
}

/* Columns under one scale. Up to 4 bits, their 16 values are scaled once for all. */
KT_INLINE void decode_span(const uint8_t *from, kt_grid_span span, int bits, meaning of, stream s,
                           __m512 zero, __m512 scale, int rounded, float *out) {
  const int table = bits > 0 && bits <= 4;
  const __m512 values =
      table ? scaled(values_of_4_bits(bits, of), zero, scale, rounded) : _mm512_setzero_ps();
  for (int64_t k = span.begin; k < span.end; k += LANES) {
    const __m128i data = row_data(from, k, bits, s);
    _mm512_storeu_ps(out + k, table ? _mm512_permutexvar_ps(codes16(data, s), values)
                                    : scaled(values16(data, bits, of, s), zero, scale, rounded));
  }
}

KT_INLINE void decode_row(const kt_matrix *m, int64_t n, int64_t row_bytes, int bits, meaning of,
                          stream s, float *out) {
  const uint8_t *const from = (const uint8_t *)m->data + n * row_bytes;
  const float *const scales = m->block_scale + kt_grid_row(m, n);
  const float *const zeros = m->zero_point ? m->zero_point + kt_grid_row(m, n) : NULL;
  const int rounded = m->round_to_bf16;
  if (!is_aligned(m)) {
    for (int64_t k = 0; k < m->cols; k += LANES) {
      const __m512 zero = zeros ? grid16(m, zeros, k) : _mm512_setzero_ps();
      const __m512 value = values16(row_data(from, k, bits, s), bits, of, s);
      _mm512_storeu_ps(out + k, scaled(value, zero, grid16(m, scales, k), rounded));
    }
    return;
  }
  for (kt_grid_span at = kt_grid_first(m); at.begin < m->cols; at = kt_grid_next(m, at))
    decode_span(from, at, bits, of, s, _mm512_set1_ps(zeros ? zeros[at.col] : 0.0f),
                _mm512_set1_ps(scales[at.col]), rounded, out);
}

/* ---- Rows that lie next to each other --------------------------------------- */

/* Where 16 rows from n on have their scales. */
typedef struct grid_lines {
  int64_t at[LANES];
  int aligned;
} grid_lines;

KT_INLINE grid_lines lines_of(const kt_matrix *m, int64_t n) {
  grid_lines lines = {.aligned = is_aligned(m)};
  for (int r = 0; r < LANES; r++) lines.at[r] = kt_grid_row(m, n + r);
  return lines;
}

/* Columns k..k+15 of row n + r of the lines; col: the first one's in the grid. */
KT_INLINE void store_scaled(const kt_matrix *m, const grid_lines *lines, int r, int64_t k,
                            int64_t col, __m512 value, float *to) {
  const float *const scales = m->block_scale + lines->at[r];
  const float *const zeros = m->zero_point ? m->zero_point + lines->at[r] : NULL;
  __m512 scale, zero = _mm512_setzero_ps();
  if (lines->aligned) {
    scale = _mm512_set1_ps(scales[col]);
    if (zeros) zero = _mm512_set1_ps(zeros[col]);
  } else {
    scale = grid16(m, scales, k);
    if (zeros) zero = grid16(m, zeros, k);
  }
  _mm512_storeu_ps(to, scaled(value, zero, scale, m->round_to_bf16));
}

/* The bytes with 16 columns of a row: `at` has the first, its next unit is `step` bytes on. */
KT_INLINE __m128i across_data(const uint8_t *at, int64_t step, int bits, stream s) {
  if (bits != 4 && bits != 8) return _mm_maskz_loadu_epi8(s.bytes, at); /* of one unit */
  __m128i data = _mm_loadu_si32(at);
  data = _mm_insert_epi32(data, _mm_cvtsi128_si32(_mm_loadu_si32(at + step)), 1);
  if (bits == 4) return data;
  data = _mm_insert_epi32(data, _mm_cvtsi128_si32(_mm_loadu_si32(at + 2 * step)), 2);
  return _mm_insert_epi32(data, _mm_cvtsi128_si32(_mm_loadu_si32(at + 3 * step)), 3);
}

/* 16 rows, each line of memory once for all of them. */
KT_INLINE void decode_across(const kt_matrix *m, int64_t n, kt_stored_unit unit, int bits, stream s,
                             float *out, int64_t stride) {
  const uint8_t *const from = (const uint8_t *)m->data + n * unit.bytes;
  const int64_t step = m->col_stride * unit.bytes;
  const grid_lines lines = lines_of(m, n);
  for (int64_t k = 0; k < m->cols; k += LANES) {
    const uint8_t *const at = from + k / unit.cols * step + k % unit.cols * bits / 8;
    const int64_t col = kt_grid_col(m, k);
    for (int r = 0; r < LANES; r++) {
      const __m128i data = across_data(at + r * unit.bytes, step, bits, s);
      store_scaled(m, &lines, r, k, col, values16(data, bits, 0, s), out + r * stride + k);
    }
  }
}

/* Words of 8 rows: two for the 16 rows of a column. */
KT_INLINE void decode_awq(const kt_matrix *m, int64_t n, float *out, int64_t stride) {
  static const int nibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const uint8_t *const from = (const uint8_t *)m->data + n / 8 * 4;
  const __m512i mask = _mm512_set1_epi64(15);
  const grid_lines lines = lines_of(m, n);
  for (int64_t k = 0; k < m->cols; k += LANES) {
    const int64_t col = kt_grid_col(m, k);
    uint64_t both[LANES];
    for (int i = 0; i < LANES; i++)
      memcpy(both + i, from + (k + i) * m->col_stride * 4, sizeof *both);
    const __m512i low = _mm512_loadu_si512(both), high = _mm512_loadu_si512(both + LANES / 2);
    for (int r = 0; r < LANES; r++) {
      const __m128i shift = _mm_cvtsi32_si128(4 * nibble[r % 8] + 32 * (r / 8));
      const __m512i first = _mm512_and_si512(_mm512_srl_epi64(low, shift), mask);
      const __m512i second = _mm512_and_si512(_mm512_srl_epi64(high, shift), mask);
      const __m512i row = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(first)),
                                             _mm512_cvtepi64_epi32(second), 1);
      store_scaled(m, &lines, r, k, col, _mm512_cvtepi32_ps(row), out + r * stride + k);
    }
  }
}

/* ---- The cells of the table ------------------------------------------------- */

KT_INLINE void decode_rows(const kt_matrix *m, int64_t row, int64_t count, int bits, meaning of,
                           float *out, int64_t stride) {
  const kt_stored_unit unit = kt_dtype_find(m->dtype)->unit;
  const stream s = stream_of(bits == SIGNED ? 8 : bits);
  if (m->col_stride == 1 && m->cols % LANES == 0) {
    const int64_t row_bytes = m->row_stride * unit.bytes;
    for (int64_t r = 0; r < count; r++)
      decode_row(m, row + r, row_bytes, bits, of, s, out + r * stride);
  } else if (count == LANES && m->cols % LANES == 0 && bits != SIGNED && !of) {
    decode_across(m, row, unit, bits, s, out, stride);
  } else {
    kt_decode_cell_scalar(m, row, count, out, stride);
  }
}

#define DECODE_DTYPE(name, bits, of)                                                               \
  void kt_decode_##name##_avx512(const kt_matrix *m, int64_t row, int64_t count, float *out,       \
                                 int64_t stride) {                                                 \
    decode_rows(m, row, count, bits, of, out, stride);                                             \
  }

DECODE_DTYPE(e2m1, 4, E2M1)
DECODE_DTYPE(e0m3, 4, E0M3)
DECODE_DTYPE(e2m3, 6, E2M3)
DECODE_DTYPE(i4, 4, TWOS_COMPLEMENT)
DECODE_DTYPE(i8, SIGNED, UNSIGNED)
DECODE_DTYPE(u2, 2, UNSIGNED)
DECODE_DTYPE(u3, 3, UNSIGNED)
DECODE_DTYPE(u4, 4, UNSIGNED)
DECODE_DTYPE(u5, 5, UNSIGNED)
DECODE_DTYPE(u6, 6, UNSIGNED)
DECODE_DTYPE(u7, 7, UNSIGNED)
DECODE_DTYPE(u8, 8, UNSIGNED)

void kt_decode_u4_awq_avx512(const kt_matrix *m, int64_t row, int64_t count, float *out,
                             int64_t stride) {
  if (m->row_stride == 1 && count == LANES && row % 8 == 0 && m->cols % LANES == 0)
    decode_awq(m, row, out, stride);
  else
    kt_decode_cell_scalar(m, row, count, out, stride);
}

KT_TARGET_END
#endif
