/* The sums of the audit's search in fixed point with AVX2. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "packed_fixed_sums.h"

KT_TARGET_BEGIN(AVX2)

INLINE int64_t total_of(__m256i sums) {
  const __m256i low = _mm256_cvtepu32_epi64(_mm256_castsi256_si128(sums));
  const __m256i four =
      _mm256_add_epi64(low, _mm256_cvtepu32_epi64(_mm256_extracti128_si256(sums, 1)));
  const __m128i two =
      _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
  return _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
}

/* By how many levels the codes of 16 columns of INT4 miss the last one. */
INLINE __m256i missed_by(__m256i m, __m256i inverse) {
  const __m256i last = _mm256_set1_epi16(7 * 1024 + 512);
  return _mm256_srli_epi16(_mm256_subs_epu16(last, _mm256_mulhi_epu16(m, inverse)), 10);
}

INLINE __m256i load_integers_of(const int16_t *from) {
  return _mm256_loadu_si256((const __m256i *)(const void *)from);
}

/* INT4. The codes' products are those of 7 with all integers less those of what is missed, whose
 * bytes, of two steps in turns of 8, a table makes squares of codes: 4 x 49 at most fit a byte. Of
 * 4096 columns a lane has the products of 512: 7 * 32767 * 512 < 2^31. */
INLINE void int4_sums(const integer_row *row, const int *step, const int count,
                      integer_sums *sums) {
  const __m256i square = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(7 * 7, 6 * 6, 5 * 5, 4 * 4, 3 * 3, 2 * 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i zero = _mm256_setzero_si256();
  __m256i inverse[4], squares[2] = {zero, zero};
  for (int i = 0; i < count; i++) {
    inverse[i] = _mm256_set1_epi16((int16_t)inverse_of(step[i], 4));
    sums[i] = (integer_sums){7 * row->total, 0};
  }
  for (int64_t begin = 0; begin < row->cols; begin += 4096) {
    const int64_t end = least(begin + 4096, row->cols);
    __m256i product[4] = {zero, zero, zero, zero};
    for (int64_t c = begin; c < end; c += 64) {
      __m256i few[2] = {zero, zero};
      KT_UNROLL(4) for (int64_t at = c; at < c + 64; at += 16) {
        const __m256i m = load_integers_of(row->weight + at);
        KT_UNROLL(2) for (int i = 0; i < count; i += 2) {
          const __m256i a = missed_by(m, inverse[i]), b = missed_by(m, inverse[i + 1]);
          product[i] = _mm256_add_epi32(product[i], _mm256_madd_epi16(a, m));
          product[i + 1] = _mm256_add_epi32(product[i + 1], _mm256_madd_epi16(b, m));
          const __m256i codes = _mm256_shuffle_epi8(square, _mm256_packs_epi16(a, b));
          few[i / 2] = _mm256_add_epi8(few[i / 2], codes);
        }
      }
      KT_UNROLL(2)
      for (int i = 0; i < count / 2; i++)
        squares[i] = _mm256_add_epi64(squares[i], _mm256_sad_epu8(few[i], zero));
    }
    for (int i = 0; i < count; i++) sums[i].product -= total_of(product[i]);
  }
  for (int i = 0; i < count; i++) {
    const __m256i each = squares[i / 2];
    const __m128i two =
        _mm_add_epi64(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
    sums[i].square = i % 2 ? _mm_extract_epi64(two, 1) : _mm_cvtsi128_si64(two);
  }
}

/* INT8, four steps: 127 * 32767 * 512 < 2^31 as well. */
INLINE void int8_sums(const integer_row *row, const int *step, integer_sums *sums) {
  const __m256i half = _mm256_set1_epi16(63), top = _mm256_set1_epi16(127);
  const __m256i zero = _mm256_setzero_si256();
  __m256i inverse[4];
  for (int i = 0; i < 4; i++) {
    inverse[i] = _mm256_set1_epi16((int16_t)inverse_of(step[i], 8));
    sums[i] = (integer_sums){0, 0};
  }
  for (int64_t begin = 0; begin < row->cols; begin += 4096) {
    const int64_t end = least(begin + 4096, row->cols);
    __m256i product[4] = {zero, zero, zero, zero}, square[4] = {zero, zero, zero, zero};
    for (int64_t c = begin; c < end; c += 16) {
      const __m256i m = load_integers_of(row->weight + c);
      KT_UNROLL(4) for (int i = 0; i < 4; i++) {
        const __m256i y = _mm256_add_epi16(_mm256_mulhi_epu16(m, inverse[i]), half);
        const __m256i code = _mm256_min_epi16(_mm256_srli_epi16(y, 7), top);
        product[i] = _mm256_add_epi32(product[i], _mm256_madd_epi16(m, code));
        square[i] = _mm256_add_epi32(square[i], _mm256_madd_epi16(code, code));
      }
    }
    for (int i = 0; i < 4; i++) {
      sums[i].product += total_of(product[i]);
      sums[i].square += total_of(square[i]);
    }
  }
}

/* Functions of their own, so that sums get all registers. */
static __attribute__((noinline)) void two(const integer_row *row, const int *step,
                                          integer_sums *sums) {
  int4_sums(row, step, 2, sums);
}

static __attribute__((noinline)) void four(const integer_row *row, const int *step,
                                           integer_sums *sums) {
  int4_sums(row, step, 4, sums);
}

static __attribute__((noinline)) void four_bytes(const integer_row *row, const int *step,
                                                 integer_sums *sums) {
  int8_sums(row, step, sums);
}

void kt_audit_sums_avx2(const integer_row *row, int bits, const int *step, int count,
                        integer_sums *sums) {
  (bits == 8 ? four_bytes : count == 2 ? two : four)(row, step, sums);
}

KT_TARGET_END
#endif
