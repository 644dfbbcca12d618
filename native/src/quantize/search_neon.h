/* search_neon.h - the loops of search.h on NEON: 4 of the 16 lanes of sums at a time, and 4
 * scales. */
#ifndef KT_SEARCH_NEON_H
#define KT_SEARCH_NEON_H

#include "../simd/unroll.h"
#include "search.h"
#include "strip.h"

#include <arm_neon.h>

KT_INLINE void kt_magnitudes_neon(const uint8_t *row, int64_t cols, int form, float *to) {
  const uint32x4_t magnitude = vdupq_n_u32(0x7fffffff);
  for (int64_t k = 0; k < cols; k += 4) {
    uint32x4_t bits;
    if (form == KT_ROW_BF16)
      bits = vshll_n_u16(vreinterpret_u16_u8(vld1_u8(row + 2 * k)), 16);
    else
      bits = vreinterpretq_u32_u8(vld1q_u8(row + 4 * k));
    vst1q_f32(to + k, vreinterpretq_f32_u32(vandq_u32(bits, magnitude)));
  }
}

/* Adds 4 binary32 sums to binary64 ones. */
KT_INLINE void kt_widen_sums_neon(float32x4_t sums, double *to) {
  vst1q_f64(to, vaddq_f64(vld1q_f64(to), vcvt_f64_f32(vget_low_f32(sums))));
  vst1q_f64(to + 2, vaddq_f64(vld1q_f64(to + 2), vcvt_high_f64_f32(sums)));
}

/* Columns `begin` to `end` of a block, of the 4 lanes from `lane` on. c * c and, without
 * importance, its sums are exact: fused or not is the same. */
KT_INLINE void kt_add_block_neon(const kt_search_row *row, const float *inverse, int64_t begin,
                                 int64_t end, const int lane, const int count, const int exact,
                                 const int weighted, kt_lane_sums *lanes) {
  enum { MOST = 4 };
  const float32x4_t top = vdupq_n_f32(row->top);
  float32x4_t product[MOST], square[MOST];
  KT_UNROLL(4) for (int i = 0; i < count; i++) product[i] = square[i] = vdupq_n_f32(0);
  for (int64_t k = begin + lane; k < end; k += KT_SEARCH_LANES) {
    const float32x4_t w = vld1q_f32(row->magnitude + k);
    const float32x4_t v = weighted ? vld1q_f32(row->importance + k) : w;
    const float32x4_t vw = weighted ? vmulq_f32(v, w) : w;
    KT_UNROLL(4) for (int i = 0; i < count; i++) {
      const float32x4_t c = vrndnq_f32(vminq_f32(vmulq_n_f32(w, inverse[i]), top));
      product[i] = exact && !weighted ? vfmaq_f32(product[i], w, c)
                                      : vaddq_f32(product[i], vmulq_f32(vw, c));
      square[i] = weighted ? vaddq_f32(square[i], vmulq_f32(v, vmulq_f32(c, c)))
                           : vfmaq_f32(square[i], c, c);
    }
  }
  KT_UNROLL(4) for (int i = 0; i < count; i++) {
    kt_widen_sums_neon(product[i], lanes[i].product + lane);
    kt_widen_sums_neon(square[i], lanes[i].square + lane);
  }
}

KT_INLINE void kt_sum_row_neon(const kt_search_row *row, const float *inverse, const int count,
                               const int exact, const int weighted, kt_code_sums *sums) {
  kt_lane_sums lanes[4];
  memset(lanes, 0, (size_t)count * sizeof lanes[0]);
  for (int64_t begin = 0, end; begin < row->cols; begin = end) {
    end = begin + KT_SEARCH_BLOCK < row->cols ? begin + KT_SEARCH_BLOCK : row->cols;
    for (int lane = 0; lane < KT_SEARCH_LANES; lane += 4)
      kt_add_block_neon(row, inverse, begin, end, lane, count, exact, weighted, lanes);
  }
  kt_add_lanes(lanes, count, sums);
}

#define KT_SUM_ROWS(count)                                                                         \
  KT_NOINLINE void kt_sum_##count##_neon(const kt_search_row *row, const float *inverse,           \
                                         kt_code_sums *sums) {                                     \
    if (row->importance)                                                                           \
      kt_sum_row_neon(row, inverse, count, 0, 1, sums);                                            \
    else if (row->exact)                                                                           \
      kt_sum_row_neon(row, inverse, count, 1, 0, sums);                                            \
    else                                                                                           \
      kt_sum_row_neon(row, inverse, count, 0, 0, sums);                                            \
  }

KT_SUM_ROWS(1)
KT_SUM_ROWS(4)
#undef KT_SUM_ROWS

static inline void kt_code_sums_neon(const kt_search_row *row, const float *inverse, int count,
                                     kt_code_sums *sums) {
  int done = 0;
  for (; done + 4 <= count; done += 4) kt_sum_4_neon(row, inverse + done, sums + done);
  for (; done < count; done++) kt_sum_1_neon(row, inverse + done, sums + done);
}

#endif
