/* MXFP4 and NVFP4 products with AVX2 (gemm/float_gemm_avx2.h). */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX2)
#include "../gemm/float_gemm_avx2.h"
#include "../simd/bits.h"
#include "fp4.h"

/* A tile of E2M1 codes (fp4.h): a 32-bit word has the nibbles of two rows and four columns. */
KT_INLINE void decode_tile(const uint8_t *tile, float *out) {
  const __m256 sizes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const __m256i sign = _mm256_set1_epi32((int)0x80000000);
  for (int line = 0; line < KT_TILE_COLS / 4; line++)
    for (int half = 0; half < 2; half++) { /* of 16 rows */
      const __m256i word =
          _mm256_loadu_si256((const __m256i *)(const void *)(tile + line * KT_LINE + 32 * half));
      KT_UNROLL(8)
      for (int i = 0; i < 8; i++) { /* nibble: row, row + 16; column 0, 2, 1, 3 */
        const __m256 size = _mm256_permutevar8x32_ps(sizes, _mm256_srli_epi32(word, 4 * i));
        const __m256i minus = _mm256_and_si256(_mm256_slli_epi32(word, 28 - 4 * i), sign);
        const int column = i / 4 + i % 4 / 2 * 2;
        float *const to = out + (line * 4 + column) * KT_STRIP + i % 2 * KT_HALF_ROWS + 8 * half;
        _mm256_storeu_ps(to, _mm256_or_ps(size, _mm256_castsi256_ps(minus)));
      }
    }
}

/* ---- MXFP4 ------------------------------------------------------------------- */

KT_INLINE void mxfp4_decode(const kt_weight *w, int64_t n, int64_t k, float *out) {
  decode_tile(w->codes + kt_bf16_tile_start(w->cols, KT_FP4_TILE, n, k), out);
}

KT_INLINE void mxfp4_scales(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]) {
  const int64_t at = kt_group_scale_index(w->cols, KT_MXFP4_GROUP, n, k / KT_MXFP4_GROUP);
  if (w->layout.scale_dtype == KT_SCALE_UE8M0) {
    kt_float_powers((const uint8_t *)w->scale + at, scale);
    return;
  }
  for (int r = 0; r < KT_STRIP; r++)
    scale[r] = kt_float((uint32_t)((const uint16_t *)w->scale)[at + r] << 16);
}

void kt_mxfp4_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_float_product(mxfp4_decode, mxfp4_scales, KT_MXFP4_GROUP, w, strip, strips, x, stride, tokens,
                   out, panel);
}

/* ---- NVFP4 ------------------------------------------------------------------- */

KT_INLINE void nvfp4_decode(const kt_weight *w, int64_t n, int64_t k, float *out) {
  decode_tile(w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k), out);
}

KT_INLINE void nvfp4_scales(const kt_weight *w, int64_t n, int64_t k, float scale[KT_STRIP]) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k);
  const uint8_t *const from = tile + KT_FP4_TILE + k % KT_TILE_COLS / KT_NVFP4_GROUP * KT_STRIP;
  for (int r = 0; r < KT_STRIP; r += 8) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(from + r));
    _mm256_storeu_ps(scale + r, kt_float_e4m3(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes)));
  }
}

void kt_nvfp4_product_avx2(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                           int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  kt_float_product(nvfp4_decode, nvfp4_scales, KT_NVFP4_GROUP, w, strip, strips, x, stride, tokens,
                   out, panel);
  kt_float_scale_rows(w, strip, strips, tokens, out);
}

KT_TARGET_END
#endif
