/* MXFP4 and NVFP4 products with fused multiply-adds of AVX-512 (gemm/float_gemm_avx512.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../gemm/float_gemm_avx512.h"
#include "../gemm/row_scales_avx512.h"
#include "fp4_scales_avx512.h"

/* kt_float_lines_fn of E2M1 codes (fp4.h): nibbles of a 32-bit word are column 0 of row r and
 * r + 16, column 2 of the two, then columns 1 and 3. */
KT_INLINE void lines(const uint8_t *tile, const int q, __m512 line[4]) {
  const __m512 table =
      _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  const __m512i words = _mm512_loadu_si512(tile + q / 2 * KT_LINE);
  const int first = q % 2 * 8; /* of columns 2 and 3 */
  line[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)first), table);
  line[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)first + 4), table);
  line[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)first + 16), table);
  line[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, (unsigned)first + 20), table);
}

KT_INLINE void mxfp4_scales(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]) {
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP4_GROUP, n, k / KT_MXFP4_GROUP);
  for (int half = 0; half < 2; half++)
    scale[half] = kt_mxfp4_scales(w->layout.scale_dtype, w->scale, at + 16 * half);
}

KT_INLINE void nvfp4_scales(const kt_weight *w, int64_t n, int64_t k, __m512 scale[2]) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k);
  const uint8_t *const from = tile + KT_FP4_TILE + k % KT_TILE_COLS / KT_NVFP4_GROUP * KT_STRIP;
  for (int half = 0; half < 2; half++) scale[half] = kt_nvfp4_scales(from + 16 * half);
}

#define MXFP4 ((kt_float_form){KT_FP4_TILE, KT_MXFP4_GROUP, lines, mxfp4_scales, 0, 0})
#define NVFP4 ((kt_float_form){KT_NVFP4_TILE, KT_NVFP4_GROUP, lines, nvfp4_scales, 3072, 0})
KT_FLOAT_KERNELS(MXFP4, of_mxfp4)
KT_FLOAT_KERNELS(NVFP4, of_nvfp4)

void kt_mxfp4_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  kt_float_product(MXFP4, &of_mxfp4, w, strip, strips, x, stride, tokens, out, panel);
}

void kt_nvfp4_product_float_avx512(const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                                   uint8_t *panel) {
  kt_float_product(NVFP4, &of_nvfp4, w, strip, strips, x, stride, tokens, out, panel);
  kt_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
