/* constants_avx512.h - constants that stay in registers: GCC would make some of them again in each
 * loop, by an operation on the port that shuffles need. Include after KT_TARGET_BEGIN(AVX512). */
#ifndef KT_CONSTANTS_AVX512_H
#define KT_CONSTANTS_AVX512_H

#include "target.h"

KT_INLINE __m512i kt_in_register(int value) {
  __m512i all = _mm512_set1_epi32(value);
  __asm__("" : "+v"(all));
  return all;
}

#endif
