/* Decoding on AVX2, 8 numbers at a time. Bit-equal to decode_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../simd/transpose_avx2.h"
#include "decode.h"
#include "decode_loops.h"

#include <string.h>

enum { LANES = 8 };

KT_INLINE __m256 widen_e4m3(__m128i bytes) {
  const __m128i sign_and_magnitude = _mm_set1_epi16((short)0xbf80);
  const __m128i half =
      _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7), sign_and_magnitude);
  const __m128i nan =
      _mm_cmpeq_epi16(_mm_or_si128(half, _mm_set1_epi16((short)0x8000)), sign_and_magnitude);
  const __m128i to_nan = _mm_and_si128(nan, _mm_set1_epi16(0x7e00 - 0x3f80));
  return _mm256_cvtph_ps(_mm_add_epi16(half, to_nan));
}

/* 8 numbers from `at`. */
KT_INLINE __m256 widen8(const uint8_t *at, int dtype) {
  const __m128i *const half = (const __m128i *)(const void *)at;
  switch (dtype) {
  case KT_BF16:
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(half)), 16));
  case KT_F16: return _mm256_cvtph_ps(_mm_loadu_si128(half));
  case KT_F32: return _mm256_loadu_ps((const float *)(const void *)at);
  default: return widen_e4m3(_mm_loadl_epi64(half));
  }
}

KT_INLINE __m256 round_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
  const __m256i rounded =
      _mm256_and_si256(_mm256_add_epi32(bits, half), _mm256_set1_epi32((int)0xffff0000u));
  const __m256i exponent = _mm256_set1_epi32(0x7f800000);
  const __m256i special = _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), exponent);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(rounded, bits, special));
}

KT_INLINE __m256 decode8(const uint8_t *at, int dtype, __m256 factor, int scaled, int rounded) {
  __m256 value = widen8(at, dtype);
  if (scaled) value = _mm256_mul_ps(value, factor);
  return rounded ? round_bf16(value) : value;
}

/* Columns begin..end-1 of a row whose columns are adjacent, all times one factor. */
KT_INLINE void decode_span(const uint8_t *from, int dtype, int64_t begin, int64_t end, float times,
                           int scaled, int rounded, float *row) {
  const int64_t size = kt_float_size(dtype);
  const __m256 factor = _mm256_set1_ps(times);
  int64_t k = begin;
  for (; k + LANES <= end; k += LANES)
    _mm256_storeu_ps(row + k, decode8(from + k * size, dtype, factor, scaled, rounded));
  if (k == end) return;
  uint8_t stored[LANES * sizeof(float)] = {0};
  float values[LANES];
  memcpy(stored, from + k * size, (size_t)((end - k) * size));
  _mm256_storeu_ps(values, decode8(stored, dtype, factor, scaled, rounded));
  memcpy(row + k, values, (size_t)(end - k) * sizeof *values);
}

/* Columns k..k+7 of rows n..n+7 of a matrix whose rows lie next to each other (row_stride 1):
 * 8 source vectors, transposed in registers. */
KT_INLINE void decode_square(const kt_matrix *m, int64_t n, int64_t k, int dtype, int rounded,
                             float *out, int64_t stride) {
  const int64_t size = kt_float_size(dtype);
  const uint8_t *from = (const uint8_t *)m->data + (n + k * m->col_stride) * size;
  __m256i source[LANES], row[LANES];
  for (int i = 0; i < LANES; i++)
    source[i] = _mm256_castps_si256(decode8(from + i * m->col_stride * size, dtype,
                                            _mm256_set1_ps(1 / KT_E4M3_UNIT), dtype == KT_F8_E4M3,
                                            rounded));
  kt_transpose8(source, row);
  for (int r = 0; r < LANES; r++)
    _mm256_storeu_ps(out + r * stride + k, _mm256_castsi256_ps(row[r]));
}

#include "decode_floats_loop.h"

DECODE_FLOATS(avx2)

/* ---- Words of 8 rows --------------------------------------------------------- */

/* The words of columns k..k+7 have, after one shift each, 8 columns of a row. */
KT_INLINE void widen_words(const uint8_t *at, int64_t step, float *out, int64_t stride) {
  static const int nibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  int32_t each[LANES];
  for (int i = 0; i < LANES; i++) memcpy(each + i, at + i * step, sizeof *each);
  const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)each);
  for (int r = 0; r < 8; r++) {
    const __m256i shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128(4 * nibble[r]));
    const __m256i code = _mm256_and_si256(shifted, _mm256_set1_epi32(15));
    _mm256_storeu_ps(out + r * stride, _mm256_cvtepi32_ps(code));
  }
}

void kt_decode_u4_awq_avx2(const kt_matrix *m, int64_t row, int64_t count, float *out,
                           int64_t stride) {
  if (row % 8 || count % 8 || m->cols % LANES) {
    kt_decode_cell_scalar(m, row, count, out, stride);
    return;
  }
  const uint8_t *const from = (const uint8_t *)m->data + row / 8 * m->row_stride * 4;
  for (int64_t k = 0; k < m->cols; k += LANES) /* each line of memory once for all rows */
    for (int64_t r = 0; r < count; r += 8)
      widen_words(from + (r / 8 * m->row_stride + k * m->col_stride) * 4, m->col_stride * 4,
                  out + r * stride + k, stride);
  for (int64_t r = 0; r < count; r++) kt_finish_row(m, row + r, out + r * stride);
}

KT_TARGET_END
#endif
