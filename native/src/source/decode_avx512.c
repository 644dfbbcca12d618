/* Decoding on AVX-512, 16 numbers at a time. Bit-equal to decode_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/transpose_avx512.h"
#include "decode.h"
#include "round_bf16_avx512.h"

enum { LANES = 16 };

/* E4M3 widens to binary16 by a shift (exponent bias 15 instead of 7, subnormals included),
 * so the value is 2^8 times the binary16's: a conversion and an exact product. */
KT_INLINE __m512 widen_e4m3(__m128i bytes, __mmask16 valid) {
  const __m256i wide = _mm256_cvtepu8_epi16(bytes);
  const __m256i magnitude = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f)) & valid;
  const __m512 value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  const __m512i sign_exponent = _mm512_set1_epi32((int)0xff800000u);
  const __m512i quiet = _mm512_set1_epi32(0x7fc00000);
  enum { AND_OR = 0xea }; /* (value & sign_exponent) | quiet */
  return _mm512_castsi512_ps(_mm512_mask_ternarylogic_epi32(_mm512_castps_si512(value), nan,
                                                            sign_exponent, quiet, AND_OR));
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
  default: return widen_e4m3(_mm_maskz_loadu_epi8(valid, at), valid);
  }
}

/* Columns begin..end-1 of a row whose columns are adjacent, all under one scale. */
KT_INLINE void decode_span(const uint8_t *from, int dtype, int64_t begin, int64_t end, float scale,
                           int scaled, int rounded, float *row) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t k = begin; k < end; k += LANES) {
    const __mmask16 valid = (__mmask16)(end - k >= LANES ? 0xffff : (1 << (end - k)) - 1);
    __m512 value = widen16(from + k * size_of(dtype), dtype, valid);
    if (scaled) value = _mm512_mul_ps(value, factor);
    if (rounded) value = kt_round_bf16(value);
    _mm512_mask_storeu_ps(row + k, valid, value);
  }
}

KT_INLINE void decode_row(const kt_matrix *m, int64_t n, int dtype, int rounded, float *row) {
  const uint8_t *from = (const uint8_t *)m->data + n * m->row_stride * size_of(dtype);
  if (dtype != KT_F8_E4M3) {
    decode_span(from, dtype, 0, m->cols, 1.0f, 0, rounded, row);
    return;
  }
  const float *scales = m->block_scale + kt_grid_row(m, n);
  for (int64_t k = 0, end; k < m->cols; k = end) {
    end = kt_grid_block_end(m, k);
    decode_span(from, dtype, k, end, scales[kt_grid_col(m, k)], 1, rounded, row);
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
    if (rounded) value = kt_round_bf16(value);
    _mm512_storeu_ps(out + r * stride + k, value);
  }
}

KT_INLINE void decode_rows(const kt_matrix *m, int64_t row, int64_t count, int dtype, int rounded,
                           float *out, int64_t stride) {
  if (m->col_stride == 1 && !m->zero_point) {
    for (int64_t r = 0; r < count; r++) decode_row(m, row + r, dtype, rounded, out + r * stride);
  } else if (count == LANES && m->cols % LANES == 0 && !m->block_scale) {
    for (int64_t k = 0; k < m->cols; k += LANES)
      decode_square(m, row, k, dtype, rounded, out, stride);
  } else {
    /* FP8 stored [in, out], or with zero points, is not a known format */
    kt_decode_rows_scalar(m, row, count, out, stride);
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
