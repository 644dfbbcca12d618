/* Decoding on AVX-512, 16 numbers at a time. Bit-equal to decode_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/transpose_avx512.h"
#include "decode.h"
#include "decode_loops.h"
#include "round_bf16_avx512.h"

#include <math.h>

enum { LANES = 16 };

/* E4M3 widens to binary16 by a shift (exponent bias 15 instead of 7, subnormals included): that is
 * E4M3_UNIT of the value. NaN, which the shift makes 1.875, becomes a NaN. */
#define E4M3_UNIT 0x1p-8f

KT_INLINE __m512 widen_e4m3(__m128i bytes) {
  const __m256i sign_and_magnitude = _mm256_set1_epi16((short)0xbf80);
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), sign_and_magnitude);
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(
      _mm256_or_si256(half, _mm256_set1_epi16((short)0x8000)), sign_and_magnitude);
  const __m256i to_nan = _mm256_set1_epi16(0x7e00 - 0x3f80);
  return _mm512_cvtph_ps(_mm256_mask_add_epi16(half, nan, half, to_nan));
}

/* Bytes of a number of the dtypes here; each is a unit. */
KT_INLINE int64_t size_of(int dtype) { return dtype == KT_F32 ? 4 : dtype == KT_F8_E4M3 ? 1 : 2; }

/* 16 numbers from `at`, or the first of them that `valid` has ones for. */
KT_INLINE __m512 widen16(const uint8_t *at, int dtype, __mmask16 valid) {
  switch (dtype) {
  case KT_BF16: {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  case KT_F16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(valid, at));
  case KT_F32: return _mm512_maskz_loadu_ps(valid, at);
  default: return widen_e4m3(_mm_maskz_loadu_epi8(valid, at));
  }
}

KT_INLINE void decode16(const uint8_t *from, int dtype, int64_t k, __mmask16 valid, __m512 factor,
                        int scaled, int rounded, float *row) {
  __m512 value = widen16(from + k * size_of(dtype), dtype, valid);
  if (scaled) value = _mm512_mul_ps(value, factor);
  if (rounded) value = kt_round_bf16(value);
  _mm512_mask_storeu_ps(row + k, valid, value);
}

/* Columns begin..end-1 of a row whose columns are adjacent, all times one factor. */
KT_INLINE void decode_span(const uint8_t *from, int dtype, int64_t begin, int64_t end, float factor,
                           int scaled, int rounded, float *row) {
  const __m512 factors = _mm512_set1_ps(factor);
  int64_t k = begin;
  for (; k + LANES <= end; k += LANES)
    decode16(from, dtype, k, 0xffff, factors, scaled, rounded, row);
  if (k < end)
    decode16(from, dtype, k, (__mmask16)((1 << (end - k)) - 1), factors, scaled, rounded, row);
}

KT_INLINE void decode_e4m3_row(const kt_matrix *m, int64_t n, int rounded, float *row) {
  const uint8_t *from = (const uint8_t *)m->data + n * m->row_stride;
  const float *scales = m->block_scale + kt_grid_row(m, n);
  for (kt_grid_span s = kt_grid_first(m); s.begin < m->cols; s = kt_grid_next(m, s)) {
    const float factor = scales[s.col] / E4M3_UNIT; /* exact */
    if (isinf(factor)) {
      kt_decode_cell_scalar(m, n, 1, row, m->cols);
      return;
    }
    decode_span(from, KT_F8_E4M3, s.begin, s.end, factor, 1, rounded, row);
  }
}

KT_INLINE void decode_row(const kt_matrix *m, int64_t n, int dtype, int rounded, float *row) {
  const uint8_t *from = (const uint8_t *)m->data + n * m->row_stride * size_of(dtype);
  if (dtype == KT_F8_E4M3) {
    decode_e4m3_row(m, n, rounded, row);
  } else if (m->block_scale) {
    decode_span(from, dtype, 0, m->cols, 1.0f, 0, 0, row);
    kt_finish_row(m, n, row);
  } else {
    decode_span(from, dtype, 0, m->cols, 1.0f, 0, rounded, row);
  }
}

/* Columns k..k+15 of rows n..n+15 of a matrix whose rows lie next to each other
 * (row_stride 1): 16 source vectors, transposed in registers. */
KT_INLINE void decode_square(const kt_matrix *m, int64_t n, int64_t k, int dtype, int rounded,
                             float *out, int64_t stride) {
  const uint8_t *from = (const uint8_t *)m->data + (n + k * m->col_stride) * size_of(dtype);
  __m512i source[16], row[16];
  for (int i = 0; i < LANES; i++)
    source[i] =
        _mm512_castps_si512(widen16(from + i * m->col_stride * size_of(dtype), dtype, 0xffff));
  kt_transpose16(source, row);
  for (int r = 0; r < LANES; r++) {
    __m512 value = _mm512_castsi512_ps(row[r]);
    if (dtype == KT_F8_E4M3) value = _mm512_mul_ps(value, _mm512_set1_ps(1 / E4M3_UNIT));
    if (rounded) value = kt_round_bf16(value);
    _mm512_storeu_ps(out + r * stride + k, value);
  }
}

KT_INLINE void decode_rows(const kt_matrix *m, int64_t row, int64_t count, int dtype, int rounded,
                           float *out, int64_t stride) {
  if (m->col_stride == 1 && !m->zero_point) {
    for (int64_t r = 0; r < count; r++) decode_row(m, row + r, dtype, rounded, out + r * stride);
  } else if (m->col_stride != 1 && count == LANES && m->cols % LANES == 0) {
    const int scaled = m->block_scale != NULL; /* then they are rounded after that */
    for (int64_t k = 0; k < m->cols; k += LANES)
      decode_square(m, row, k, dtype, rounded && !scaled, out, stride);
    for (int64_t r = 0; scaled && r < count; r++) kt_finish_row(m, row + r, out + r * stride);
  } else {
    /* numbers with zero points are no known format */
    kt_decode_cell_scalar(m, row, count, out, stride);
  }
}

/* One instantiation per dtype, so that the inner loops hold no switch. */
#define DECODE_DTYPE(name, dtype)                                                                  \
  void kt_decode_##name##_avx512(const kt_matrix *m, int64_t row, int64_t count, float *out,       \
                                 int64_t stride) {                                                 \
    if (m->round_to_bf16)                                                                          \
      decode_rows(m, row, count, dtype, 1, out, stride);                                           \
    else                                                                                           \
      decode_rows(m, row, count, dtype, 0, out, stride);                                           \
  }

DECODE_DTYPE(bf16, KT_BF16)
DECODE_DTYPE(f16, KT_F16)
DECODE_DTYPE(f32, KT_F32)
DECODE_DTYPE(e4m3, KT_F8_E4M3)

KT_TARGET_END
#endif
