/* MXFP4 products with AVX-512. */
#include "../cpu.h"

#if KT_X86
#include "../common/target_avx512_bf16.h"

#include "../common/bf16_gemm_avx512.h"
#include "mxfp4.h"

static kt_line_tables make_tables(void) {
  const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)kt_mxfp4_bf16);
  return (kt_line_tables){.words = _mm512_broadcast_i64x4(words)};
}

_Static_assert(KT_BF16_K_BLOCK * KT_STRIP * 2 +
                       KT_STRIP * 4 * (KT_PANEL_SIZE / 8 / KT_MXFP4_GROUP) <=
                   KT_PANEL_SIZE,
               "scales of a strip lie in the panel");

/* 16 packed scales as floats. UE8M0: the byte is the exponent; 0 means 2^-127, the one
 * denormal. */
KT_INLINE __m512 load_scales(int32_t dtype, const void *scale, int64_t at) {
  if (dtype == KT_SCALE_BF16) {
    const uint16_t *const from = (const uint16_t *)scale + at;
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  const uint8_t *const from = (const uint8_t *)scale + at;
  const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)from);
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(codes), 23);
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x00400000)));
}

static void spread_scales(const kt_weight *w, int64_t strip, float *out) {
  const int64_t count = w->cols / KT_MXFP4_GROUP * KT_STRIP;
  for (int64_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(out + i, load_scales(w->layout.scale_dtype, w->scale, strip * count + i));
}

void kt_mxfp4_product_avx512(const kt_weight *w, int64_t strip, int64_t strips, const uint8_t *x,
                             int64_t stride, int64_t tokens, float *out, uint8_t *panel) {
  const kt_line_tables tables = make_tables();
  float *const scales = (float *)(void *)(panel + KT_STRIP * KT_BF16_K_BLOCK * 2);
  for (int64_t s = 0; s < strips; s++) {
    spread_scales(w, strip + s, scales);
    kt_bf16_product(KT_FORM_MXFP4, &tables, w, strip + s, 1, KT_MXFP4_GROUP, scales, x, stride,
                    tokens, out + s * tokens * KT_STRIP, panel);
  }
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
