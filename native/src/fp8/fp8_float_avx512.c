/* FP8 and MXFP8 products with fused multiply-adds of AVX-512 (float_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../gemm/float_gemm_avx512.h"
#include "../gemm/powers_avx512.h"
#include "../gemm/row_scales_avx512.h"
#include "fp8.h"

/* Numbers are 256 times too small, which scales make good, or (MXFP8) sums before scales. */
KT_INLINE void lines(const uint8_t *tile, const int q, __m512 line[4]) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7); /* rows 0..15, then 16..31 */
  const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(tile + q * KT_LINE));
  const __m512i even = kt_float_e4m3_halves(_mm512_slli_epi16(codes, 8));
  const __m512i odd = kt_float_e4m3_halves(codes);
  line[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
  line[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
  line[2] = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
  line[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}

/* Of a block of 128 x 128. */
KT_INLINE void scales_of(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]) {
  const float *const all = w->scale;
  const float one = all[n / KT_STRIP * (w->cols / KT_FP8_BLOCK) + k / KT_FP8_BLOCK];
  scale[0] = scale[1] = _mm512_set1_ps(256.0f * one);
}

/* Of a group of 32 columns. 256 times the largest are infinite. */
KT_INLINE void powers_of(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]) {
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP8_GROUP, n, k / KT_MXFP8_GROUP);
  scale[0] = kt_power_scales((const uint8_t *)w->scale + at);
  scale[1] = kt_power_scales((const uint8_t *)w->scale + at + KT_HALF_ROWS);
}

#define BLOCKS ((kt_float_form){KT_FP8_TILE, KT_FP8_BLOCK, lines, scales_of, 0, 0})
#define ROWS ((kt_float_form){KT_FP8_TILE, 0, lines, NULL, 0, 0})
#define MXFP8 ((kt_float_form){KT_FP8_TILE, KT_MXFP8_GROUP, lines, powers_of, 0, 256.0f})
KT_FLOAT_KERNELS(BLOCKS, of_blocks)
KT_FLOAT_KERNELS(ROWS, of_rows)
KT_FLOAT_KERNELS(MXFP8, of_mxfp8)

void kt_fp8_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                 const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                 uint8_t *panel) {
  if (w->layout.group) {
    kt_float_product(BLOCKS, &of_blocks, w, strip, strips, x, stride, tokens, out, panel);
    return;
  }
  kt_float_product(ROWS, &of_rows, w, strip, strips, x, stride, tokens, out, panel);
  for (int64_t i = 0; i < strips * tokens * KT_STRIP; i += 16)
    _mm512_store_ps(out + i, _mm512_mul_ps(_mm512_load_ps(out + i), _mm512_set1_ps(256.0f)));
  kt_scale_rows(w, strip, strips, tokens, out);
}

void kt_mxfp8_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  kt_float_product(MXFP8, &of_mxfp8, w, strip, strips, x, stride, tokens, out, panel);
}

KT_TARGET_END
#endif
