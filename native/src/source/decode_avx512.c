/* Decoding on AVX-512, 16 numbers at a time. Bit-equal to decode_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/transpose_avx512.h"
#include "decode.h"
#include "decode_loops.h"
#include "round_bf16_avx512.h"

enum { LANES = 16 };

KT_INLINE __m512 widen_e4m3(__m128i bytes) {
  const __m256i sign_and_magnitude = _mm256_set1_epi16((short)0xbf80);
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), sign_and_magnitude);
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(
      _mm256_or_si256(half, _mm256_set1_epi16((short)0x8000)), sign_and_magnitude);
  const __m256i to_nan = _mm256_set1_epi16(0x7e00 - 0x3f80);
  return _mm512_cvtph_ps(_mm256_mask_add_epi16(half, nan, half, to_nan));
}

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
  __m512 value = widen16(from + k * kt_float_size(dtype), dtype, valid);
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

/* Columns k..k+15 of rows n..n+15 of a matrix whose rows lie next to each other
 * (row_stride 1): 16 source vectors, transposed in registers. */
KT_INLINE void decode_square(const kt_matrix *m, int64_t n, int64_t k, int dtype, int rounded,
                             float *out, int64_t stride) {
  const uint8_t *from = (const uint8_t *)m->data + (n + k * m->col_stride) * kt_float_size(dtype);
  __m512i source[16], row[16];
  for (int i = 0; i < LANES; i++)
    source[i] = _mm512_castps_si512(
        widen16(from + i * m->col_stride * kt_float_size(dtype), dtype, 0xffff));
  kt_transpose16(source, row);
  for (int r = 0; r < LANES; r++) {
    __m512 value = _mm512_castsi512_ps(row[r]);
    if (dtype == KT_F8_E4M3) value = _mm512_mul_ps(value, _mm512_set1_ps(1 / KT_E4M3_UNIT));
    if (rounded) value = kt_round_bf16(value);
    _mm512_storeu_ps(out + r * stride + k, value);
  }
}

#include "decode_floats_loop.h"

DECODE_FLOATS(avx512)

KT_TARGET_END
#endif
