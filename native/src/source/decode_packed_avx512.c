/* Packed integers and FP4 on AVX-512, 16 numbers at a time. Bit-equal to decode_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/transpose_avx512.h"
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

KT_INLINE __m512i codes16(const uint8_t *at, stream s) {
  const __m512i data = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(s.bytes, at));
  const __m512i pairs = _mm512_permutexvar_epi16(s.words, data);
  return _mm512_and_si512(_mm512_srlv_epi32(pairs, s.shift), s.mask);
}

KT_INLINE __m512 e2m1_values(void) {
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

/* ---- Scales ---------------------------------------------------------------- */

/* Whether all columns of a vector have the same scale. */
KT_INLINE int is_aligned(const kt_matrix *m) {
  return !m->group_of_col && m->block_cols % LANES == 0 && m->col_origin % LANES == 0;
}

/* Of columns k..k+15, from a row of the grid. */
KT_INLINE __m512 grid16(const kt_matrix *m, const float *row, int64_t k) {
  float each[LANES];
  for (int i = 0; i < LANES; i++) each[i] = row[kt_grid_col(m, k + i)];
  return _mm512_loadu_ps(each);
}

KT_INLINE __m512 scaled(__m512 value, __m512 zero, __m512 scale, int rounded) {
  value = _mm512_mul_ps(_mm512_sub_ps(value, zero), scale);
  return rounded ? kt_round_bf16(value) : value;
}

/* ---- Rows that lie contiguously -------------------------------------------- */

KT_INLINE __m512 values16(const uint8_t *row, int64_t k, int bits, int e2m1, stream s) {
  if (bits == SIGNED)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(row + k))));
  const __m512i codes = codes16(row + k * bits / 8, s);
  return e2m1 ? _mm512_permutexvar_ps(codes, e2m1_values()) : _mm512_cvtepi32_ps(codes);
}

KT_INLINE void decode_row(const kt_matrix *m, int64_t n, int64_t row_bytes, int bits, int e2m1,
                          stream s, float *out) {
  const uint8_t *const from = (const uint8_t *)m->data + n * row_bytes;
  const float *const scales = m->block_scale + kt_grid_row(m, n);
  const float *const zeros = m->zero_point ? m->zero_point + kt_grid_row(m, n) : NULL;
  const int aligned = is_aligned(m);
  const int rounded = m->round_to_bf16;
  if (!aligned) {
    for (int64_t k = 0; k < m->cols; k += LANES) {
      const __m512 zero = zeros ? grid16(m, zeros, k) : _mm512_setzero_ps();
      const __m512 value = values16(from, k, bits, e2m1, s);
      _mm512_storeu_ps(out + k, scaled(value, zero, grid16(m, scales, k), rounded));
    }
    return;
  }
  for (int64_t k = 0, end; k < m->cols; k = end) {
    end = kt_grid_block_end(m, k);
    const __m512 scale = _mm512_set1_ps(scales[kt_grid_col(m, k)]);
    const __m512 zero = _mm512_set1_ps(zeros ? zeros[kt_grid_col(m, k)] : 0.0f);
    for (int64_t i = k; i < end; i += LANES)
      _mm512_storeu_ps(out + i, scaled(values16(from, i, bits, e2m1, s), zero, scale, rounded));
  }
}

/* ---- Rows that lie next to each other --------------------------------------- */

/* Columns k..k+15 of 16 rows, transposed: of each row its number. */
KT_INLINE void store_columns(const kt_matrix *m, int64_t n, int64_t k, const __m512i row[LANES],
                             float *out, int64_t stride) {
  const int aligned = is_aligned(m);
  for (int r = 0; r < LANES; r++) {
    const float *const scales = m->block_scale + kt_grid_row(m, n + r);
    const float *const zeros = m->zero_point ? m->zero_point + kt_grid_row(m, n + r) : NULL;
    __m512 scale, zero = _mm512_setzero_ps();
    if (aligned) {
      scale = _mm512_set1_ps(scales[kt_grid_col(m, k)]);
      if (zeros) zero = _mm512_set1_ps(zeros[kt_grid_col(m, k)]);
    } else {
      scale = grid16(m, scales, k);
      if (zeros) zero = grid16(m, zeros, k);
    }
    const __m512 value = _mm512_cvtepi32_ps(row[r]);
    _mm512_storeu_ps(out + r * stride + k, scaled(value, zero, scale, m->round_to_bf16));
  }
}

/* Words of 32 / bits columns: 16 rows of a column at a time. */
KT_INLINE void decode_words(const kt_matrix *m, int64_t n, int bits, float *out, int64_t stride) {
  const int64_t per_word = 32 / bits;
  const uint8_t *const from = (const uint8_t *)m->data + n * 4;
  const __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
  for (int64_t k = 0; k < m->cols; k += LANES) {
    __m512i column[LANES], row[LANES];
    for (int i = 0; i < LANES; i++) {
      const uint8_t *const at = from + (k + i) / per_word * m->col_stride * 4;
      const __m128i shift = _mm_cvtsi32_si128((int)((k + i) % per_word) * bits);
      column[i] = _mm512_and_si512(_mm512_srl_epi32(_mm512_loadu_si512(at), shift), mask);
    }
    kt_transpose16(column, row);
    store_columns(m, n, k, row, out, stride);
  }
}

/* Words of 8 rows: two for the 16 rows of a column. */
KT_INLINE void decode_awq(const kt_matrix *m, int64_t n, float *out, int64_t stride) {
  static const int nibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  const uint8_t *const from = (const uint8_t *)m->data + n / 8 * 4;
  const __m512i mask = _mm512_set1_epi64(15);
  for (int64_t k = 0; k < m->cols; k += LANES) {
    uint64_t both[LANES];
    for (int i = 0; i < LANES; i++)
      memcpy(both + i, from + (k + i) * m->col_stride * 4, sizeof *both);
    const __m512i low = _mm512_loadu_si512(both), high = _mm512_loadu_si512(both + LANES / 2);
    __m512i row[LANES];
    for (int r = 0; r < LANES; r++) {
      const __m128i shift = _mm_cvtsi32_si128(4 * nibble[r % 8] + 32 * (r / 8));
      const __m512i first = _mm512_and_si512(_mm512_srl_epi64(low, shift), mask);
      const __m512i second = _mm512_and_si512(_mm512_srl_epi64(high, shift), mask);
      row[r] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi64_epi32(first)),
                                  _mm512_cvtepi64_epi32(second), 1);
    }
    store_columns(m, n, k, row, out, stride);
  }
}

/* ---- The cells of the table ------------------------------------------------- */

KT_INLINE void decode_rows(const kt_matrix *m, int64_t row, int64_t count, int bits, int e2m1,
                           float *out, int64_t stride) {
  const kt_stored_unit unit = kt_dtype_find(m->dtype)->unit;
  if (m->col_stride == 1 && m->cols % LANES == 0) {
    const stream s = stream_of(bits == SIGNED ? 8 : bits);
    const int64_t row_bytes = m->row_stride * unit.bytes;
    for (int64_t r = 0; r < count; r++)
      decode_row(m, row + r, row_bytes, bits, e2m1, s, out + r * stride);
  } else if (count == LANES && m->cols % LANES == 0 && bits != SIGNED && !e2m1 && 32 % bits == 0) {
    decode_words(m, row, bits, out, stride);
  } else {
    kt_decode_rows_scalar(m, row, count, out, stride);
  }
}

#define DECODE_DTYPE(name, bits, e2m1)                                                             \
  void kt_decode_##name##_avx512(const kt_matrix *m, int64_t row, int64_t count, float *out,       \
                                 int64_t stride) {                                                 \
    decode_rows(m, row, count, bits, e2m1, out, stride);                                           \
  }

DECODE_DTYPE(e2m1, 4, 1)
DECODE_DTYPE(i8, SIGNED, 0)
DECODE_DTYPE(u2, 2, 0)
DECODE_DTYPE(u3, 3, 0)
DECODE_DTYPE(u4, 4, 0)
DECODE_DTYPE(u5, 5, 0)
DECODE_DTYPE(u6, 6, 0)
DECODE_DTYPE(u7, 7, 0)
DECODE_DTYPE(u8, 8, 0)

void kt_decode_u4_awq_avx512(const kt_matrix *m, int64_t row, int64_t count, float *out,
                             int64_t stride) {
  if (m->row_stride == 1 && count == LANES && row % 8 == 0 && m->cols % LANES == 0)
    decode_awq(m, row, out, stride);
  else
    kt_decode_rows_scalar(m, row, count, out, stride);
}

KT_TARGET_END
#endif
