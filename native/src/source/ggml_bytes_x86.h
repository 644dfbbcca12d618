/* ggml_bytes_x86.h - as ggml_bytes_scalar.h, for AVX2 and AVX-512: bytes are 16 at a time on both,
 * because loads of more would wait for the stores of two, values GGML_LANES: 8 or 16. */
#ifndef KT_GGML_BYTES_H
#define KT_GGML_BYTES_H

#include "../simd/target.h"

#include <stdint.h>
#include <string.h>

KT_INLINE float ggml_half(const uint8_t *at) {
  uint16_t half;
  memcpy(&half, at, sizeof half);
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

KT_INLINE void ggml_nibbles(const uint8_t *from, const int count, const int zero, int8_t *code) {
  const __m128i low = _mm_set1_epi8(15), less = _mm_set1_epi8((char)zero);
  for (int i = 0; i < count; i += 16) {
    const __m128i bytes = count < 16 ? _mm_loadl_epi64((const __m128i *)(const void *)from)
                                     : _mm_loadu_si128((const __m128i *)(const void *)(from + i));
    const __m128i first = _mm_sub_epi8(_mm_and_si128(bytes, low), less);
    const __m128i second = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), less);
    __m128i *const to = (__m128i *)(void *)(code + i);
    if (count < 16) {
      _mm_storeu_si128(to, _mm_unpacklo_epi64(first, second));
    } else {
      _mm_storeu_si128(to, first);
      _mm_storeu_si128((__m128i *)(void *)(code + count + i), second);
    }
  }
}

KT_INLINE void ggml_fifth_bits(const uint8_t from[4], const int zero, int8_t code[32]) {
  int32_t word;
  memcpy(&word, from, sizeof word);
  const __m128i all = _mm_cvtsi32_si128(word), less = _mm_set1_epi8((char)zero);
  const __m128i bit_of = _mm_set1_epi64x((long long)0x8040201008040201u);
  for (int i = 0; i < 2; i++) {
    const __m128i byte_of =
        _mm_set_epi64x(0x0101010101010101 * (2 * i + 1), 0x0202020202020202 * i);
    const __m128i spread = _mm_shuffle_epi8(all, byte_of);
    const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(spread, bit_of), bit_of);
    __m128i *const to = (__m128i *)(void *)(code + 16 * i);
    const __m128i five = _mm_or_si128(_mm_loadu_si128(to), _mm_and_si128(set, _mm_set1_epi8(16)));
    _mm_storeu_si128(to, _mm_sub_epi8(five, less));
  }
}

KT_INLINE void ggml_look_up(const int8_t table[16], const int count, int8_t *code) {
  const __m128i numbers = _mm_loadu_si128((const __m128i *)(const void *)table);
  for (int i = 0; i < count; i += 16) {
    __m128i *const at = (__m128i *)(void *)(code + i);
    _mm_storeu_si128(at, _mm_shuffle_epi8(numbers, _mm_loadu_si128(at)));
  }
}

KT_INLINE void ggml_values(const int8_t *code, const int count, float scale, float offset,
                           const int offsets, float *restrict out) {
#if GGML_LANES == 16
  const __m512 factor = _mm512_set1_ps(scale), less = _mm512_set1_ps(offset);
  for (int i = 0; i < count; i += 16) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(code + i));
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), factor);
    _mm512_storeu_ps(out + i, offsets ? _mm512_sub_ps(value, less) : value);
  }
#else
  const __m256 factor = _mm256_set1_ps(scale), less = _mm256_set1_ps(offset);
  for (int i = 0; i < count; i += 8) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(code + i));
    const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), factor);
    _mm256_storeu_ps(out + i, offsets ? _mm256_sub_ps(value, less) : value);
  }
#endif
}

#endif
