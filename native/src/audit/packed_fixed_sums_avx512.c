/* The sums of the audit's search in fixed point with AVX-512, with VNNI or without, which compilers
 * make four times slower. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"
#include "../simd/unroll.h"
#include "packed_fixed_sums.h"

KT_TARGET_BEGIN(AVX512)

typedef __m512i dot_fn(__m512i sum, __m512i a, __m512i b);

INLINE __m512i dot_of(__m512i sum, __m512i a, __m512i b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
}

/* sum + the squares of 7 - n, of bytes n: in the lower half of each 128 bits apart from the upper.
 */
typedef __m512i add_squares_fn(__m512i sum, __m512i missed);

INLINE __m512i add_squares(__m512i sum, __m512i missed) {
  const __m512i square = _mm512_broadcast_i32x4(
      _mm_setr_epi8(7 * 7, 6 * 6, 5 * 5, 4 * 4, 3 * 3, 2 * 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m512i codes = _mm512_shuffle_epi8(square, missed);
  return _mm512_add_epi64(sum, _mm512_sad_epu8(codes, _mm512_setzero_si512()));
}

INLINE int64_t total_of(__m512i sums) {
  const __m512i low = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(sums));
  const __m512i high = _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(sums, 1));
  return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high));
}

/* By how many levels the codes of 32 columns of INT4 miss the last one. */
INLINE __m512i missed_by(__m512i m, __m512i inverse) {
  const __m512i last = _mm512_set1_epi16(7 * 1024 + 512);
  return _mm512_srli_epi16(_mm512_subs_epu16(last, _mm512_mulhi_epu16(m, inverse)), 10);
}

/* INT4. The codes' products are those of 7 with all integers less those of what is missed, whose
 * bytes lie side by side of two steps, 8 of each. Of 4096 columns a lane has the products of 256.
 */
INLINE void int4_sums(const integer_row *row, const int *step, const int count, dot_fn *dot,
                      add_squares_fn *add, integer_sums *sums) {
  const __m512i zero = _mm512_setzero_si512();
  __m512i inverse[4];
  for (int i = 0; i < count; i++) {
    inverse[i] = _mm512_set1_epi16((int16_t)inverse_of(step[i], 4));
    sums[i] = (integer_sums){7 * row->total, 0};
  }
  for (int64_t begin = 0; begin < row->cols; begin += 4096) {
    const int64_t end = least(begin + 4096, row->cols);
    __m512i product[4] = {zero, zero, zero, zero}, square[2] = {zero, zero};
    for (int64_t c = begin; c < end; c += 32) {
      const __m512i m = _mm512_loadu_si512(row->weight + c);
      KT_UNROLL(2) for (int i = 0; i < count; i += 2) {
        const __m512i a = missed_by(m, inverse[i]), b = missed_by(m, inverse[i + 1]);
        product[i] = dot(product[i], a, m);
        product[i + 1] = dot(product[i + 1], b, m);
        square[i / 2] = add(square[i / 2], _mm512_packs_epi16(a, b));
      }
    }
    for (int i = 0; i < count; i++) {
      const __mmask16 own = i % 2 ? 0xcccc : 0x3333;
      sums[i].product -= total_of(product[i]);
      sums[i].square += _mm512_mask_reduce_add_epi32(own, square[i / 2]);
    }
  }
}

/* INT8, four steps. */
INLINE void int8_sums(const integer_row *row, const int *step, dot_fn *dot, integer_sums *sums) {
  const __m512i half = _mm512_set1_epi16(63), top = _mm512_set1_epi16(127);
  const __m512i zero = _mm512_setzero_si512();
  __m512i inverse[4];
  for (int i = 0; i < 4; i++) {
    inverse[i] = _mm512_set1_epi16((int16_t)inverse_of(step[i], 8));
    sums[i] = (integer_sums){0, 0};
  }
  for (int64_t begin = 0; begin < row->cols; begin += 4096) {
    const int64_t end = least(begin + 4096, row->cols);
    __m512i product[4] = {zero, zero, zero, zero}, square[4] = {zero, zero, zero, zero};
    for (int64_t c = begin; c < end; c += 32) {
      const __m512i m = _mm512_loadu_si512(row->weight + c);
      KT_UNROLL(4) for (int i = 0; i < 4; i++) {
        const __m512i y = _mm512_add_epi16(_mm512_mulhi_epu16(m, inverse[i]), half);
        const __m512i code = _mm512_min_epi16(_mm512_srli_epi16(y, 7), top);
        product[i] = dot(product[i], m, code);
        square[i] = dot(square[i], code, code);
      }
    }
    for (int i = 0; i < 4; i++) {
      sums[i].product += total_of(product[i]);
      sums[i].square += total_of(square[i]);
    }
  }
}

/* Functions of their own, so that sums get all registers. */
#define SUMS(level, dot, add)                                                                      \
  static __attribute__((noinline)) void two_##level(const integer_row *row, const int *step,       \
                                                    integer_sums *sums) {                          \
    int4_sums(row, step, 2, dot, add, sums);                                                       \
  }                                                                                                \
  static __attribute__((noinline)) void four_##level(const integer_row *row, const int *step,      \
                                                     integer_sums *sums) {                         \
    int4_sums(row, step, 4, dot, add, sums);                                                       \
  }                                                                                                \
  static __attribute__((noinline)) void four_bytes_##level(const integer_row *row,                 \
                                                           const int *step, integer_sums *sums) {  \
    int8_sums(row, step, dot, sums);                                                               \
  }                                                                                                \
  void kt_audit_sums_##level(const integer_row *row, int bits, const int *step, int count,         \
                             integer_sums *sums) {                                                 \
    (bits == 8 ? four_bytes_##level : count == 2 ? two_##level : four_##level)(row, step, sums);   \
  }

SUMS(avx512, dot_of, add_squares)
KT_TARGET_END

KT_TARGET_BEGIN(AVX512_VNNI)

INLINE __m512i dot_of_vnni(__m512i sum, __m512i a, __m512i b) {
  return _mm512_dpwssd_epi32(sum, a, b);
}

INLINE __m512i add_squares_vnni(__m512i sum, __m512i missed) {
  const __m512i codes = _mm512_sub_epi8(_mm512_set1_epi8(7), missed);
  return _mm512_dpbusd_epi32(sum, codes, codes);
}

SUMS(vnni, dot_of_vnni, add_squares_vnni)
KT_TARGET_END
#endif
