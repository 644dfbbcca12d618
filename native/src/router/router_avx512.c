/* The loops of routers with AVX-512; the same bits as router_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

#include <math.h>

KT_TARGET_BEGIN(AVX512)
#include "../simd/exponential_avx512.h"
#include "router.h"

KT_INLINE __m512 ones(void) { return _mm512_set1_ps(1.0f); }

/* Of the lanes of a block that are below `count`. */
KT_INLINE __mmask16 lanes_below(int64_t count) {
  return count >= KT_BLOCK ? 0xffff : (__mmask16)((1u << count) - 1);
}

KT_INLINE float sum_of(__m512 lane) {
  float sums[KT_BLOCK];
  _mm512_storeu_ps(sums, lane);
  for (int width = KT_BLOCK / 2; width; width /= 2)
    for (int j = 0; j < width; j++) sums[j] += sums[j + width];
  return sums[0];
}

static void softmax(const float *logits, int64_t padded, float *scores) {
  __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < padded; i += KT_BLOCK)
    most = _mm512_max_ps(_mm512_loadu_ps(logits + i), most); /* NaN: most */
  most = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (int64_t i = 0; i < padded; i += KT_BLOCK) {
    const __m512 power = kt_exp16(_mm512_sub_ps(_mm512_loadu_ps(logits + i), most));
    sum = _mm512_add_ps(sum, power);
    _mm512_storeu_ps(scores + i, power);
  }
  sum = _mm512_set1_ps(sum_of(sum));
  for (int64_t i = 0; i < padded; i += KT_BLOCK)
    _mm512_storeu_ps(scores + i, _mm512_div_ps(_mm512_loadu_ps(scores + i), sum));
}

KT_INLINE __m512 sigmoid(__m512 one, __m512 shift, __m512 z) {
  return _mm512_div_ps(ones(), _mm512_add_ps(one, kt_exp16(_mm512_sub_ps(shift, z))));
}

KT_INLINE __m512 softplus(__m512 z) {
  const __m512 two = _mm512_set1_ps(2.0f), zero = _mm512_setzero_ps();
  const __m512 t = kt_exp16(_mm512_or_ps(z, _mm512_set1_ps(-0.0f)));
  const __m512 twice = _mm512_div_ps(two, _mm512_add_ps(two, t));
  const __m512 part = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), t), twice);
  const __m512 series = kt_horner16(kt_artanh_series, KT_ARTANH_TERMS, _mm512_mul_ps(part, part));
  const __m512 log1p_t = _mm512_mul_ps(_mm512_mul_ps(t, twice), series);
  return _mm512_add_ps(_mm512_max_ps(zero, z), log1p_t);
}

static void scores(int scoring, float shift, const float *logits, int64_t padded, float *scores) {
  if (scoring == KT_SOFTMAX) softmax(logits, padded, scores);
  const __m512 by = _mm512_set1_ps(shift), one = _mm512_set1_ps(kt_exp(shift));
  for (int64_t i = 0; i < padded && scoring == KT_SIGMOID; i += KT_BLOCK)
    _mm512_storeu_ps(scores + i, sigmoid(one, by, _mm512_loadu_ps(logits + i)));
  for (int64_t i = 0; i < padded && scoring == KT_SQRT_SOFTPLUS; i += KT_BLOCK)
    _mm512_storeu_ps(scores + i, _mm512_sqrt_ps(softplus(_mm512_loadu_ps(logits + i))));
}

static int pad(const float *logits, int64_t count, float *padded) {
  __mmask16 nan = 0;
  for (int64_t i = 0; i < count; i += KT_BLOCK) {
    const __m512 z =
        _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes_below(count - i), logits + i);
    nan |= _mm512_cmp_ps_mask(z, z, _CMP_UNORD_Q);
    _mm512_storeu_ps(padded + i, z);
  }
  return nan != 0;
}

KT_INLINE __m512i order_of(__m512 value) {
  const __m512i bits = _mm512_castps_si512(_mm512_add_ps(value, _mm512_setzero_ps()));
  const __m512i order =
      _mm512_mask_xor_epi32(bits, _mm512_movepi32_mask(bits), bits, _mm512_set1_epi32(0x7fffffff));
  return _mm512_mask_mov_epi32(order, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                               _mm512_set1_epi32(KT_ORDER_LEAST));
}

static void orders(const float *values, const float *added, int64_t count, int32_t *order) {
  for (int64_t i = 0; i < count; i += KT_BLOCK) {
    const __mmask16 here = lanes_below(count - i);
    __m512 value = _mm512_maskz_loadu_ps(here, values + i);
    if (added) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(here, added + i));
    _mm512_mask_storeu_epi32(order + i, here, order_of(value));
  }
}

/* The two best of four, lane by lane. */
KT_INLINE void merge(__m512i *first, __m512i *second, __m512i other_first, __m512i other_second) {
  const __m512i less = _mm512_min_epi32(*first, other_first);
  *first = _mm512_max_epi32(*first, other_first);
  *second = _mm512_max_epi32(less, _mm512_max_epi32(*second, other_second));
}

static void best_two(const int32_t *order, int64_t count, int32_t best[2]) {
  const __m512i none = _mm512_set1_epi32(KT_ORDER_TAKEN);
  __m512i first = none, second = none;
  for (int64_t i = 0; i < count; i += KT_BLOCK)
    merge(&first, &second, _mm512_mask_loadu_epi32(none, lanes_below(count - i), order + i), none);
  merge(&first, &second, _mm512_shuffle_i64x2(first, first, 0x4e),
        _mm512_shuffle_i64x2(second, second, 0x4e));
  merge(&first, &second, _mm512_shuffle_i64x2(first, first, 0xb1),
        _mm512_shuffle_i64x2(second, second, 0xb1));
  merge(&first, &second, _mm512_shuffle_epi32(first, 0x4e), _mm512_shuffle_epi32(second, 0x4e));
  merge(&first, &second, _mm512_shuffle_epi32(first, 0xb1), _mm512_shuffle_epi32(second, 0xb1));
  best[0] = _mm512_cvtsi512_si32(first);
  best[1] = _mm512_cvtsi512_si32(second);
}

static int64_t best(const int32_t *order, int64_t padded) {
  __m512i most = _mm512_set1_epi32(KT_ORDER_TAKEN);
  for (int64_t i = 0; i < padded; i += KT_BLOCK)
    most = _mm512_max_epi32(most, _mm512_loadu_si512(order + i));
  most = _mm512_set1_epi32(_mm512_reduce_max_epi32(most));
  for (int64_t i = 0;; i += KT_BLOCK) {
    const __mmask16 equal = _mm512_cmpeq_epi32_mask(most, _mm512_loadu_si512(order + i));
    if (equal) return i + __builtin_ctz(equal);
  }
}

const kt_router_loops kt_router_loops_avx512 = {pad, scores, orders, best_two, best};

KT_TARGET_END
#endif
