/* exponential_avx512.h - exponential.h, 16 numbers at a time; the same bits. */
#ifndef KT_EXPONENTIAL_AVX512_H
#define KT_EXPONENTIAL_AVX512_H

#include "exponential.h"

KT_INLINE __m512 kt_horner16(const float *terms, int count, __m512 x) {
  __m512 sum = _mm512_set1_ps(terms[0]);
  for (int i = 1; i < count; i++) sum = _mm512_fmadd_ps(sum, x, _mm512_set1_ps(terms[i]));
  return sum;
}

typedef struct kt_reduced16 {
  __m512 r;
  __m512i n;
} kt_reduced16;

KT_INLINE kt_reduced16 kt_reduce16(__m512 x) {
  const __m512 rounder = _mm512_set1_ps(KT_ROUNDER);
  const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(KT_LOG2_E), rounder);
  const __m512 n = _mm512_sub_ps(shifted, rounder);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_LN2_HIGH), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(KT_LN2_LOW), r);
  return (kt_reduced16){
      r, _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(KT_ROUNDER_BITS))};
}

KT_INLINE __m512 kt_power_of_two16(__m512i n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}

/* scalef rounds once, as the scalar products do, of which the first is exact. Of the operands of
 * max and min, the second is the result where they are unordered: NaN passes through. */
KT_INLINE __m512 kt_exp16(__m512 x) {
  const __m512 above = _mm512_max_ps(_mm512_set1_ps(KT_EXP_IS_ZERO), x);
  const kt_reduced16 e = kt_reduce16(_mm512_min_ps(_mm512_set1_ps(KT_EXP_IS_INFINITE), above));
  return _mm512_scalef_ps(kt_horner16(kt_exp_taylor, KT_EXP_TERMS, e.r), _mm512_cvtepi32_ps(e.n));
}

#endif
