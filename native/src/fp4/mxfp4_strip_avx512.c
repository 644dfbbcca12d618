/* Strips of the transpose of MXFP4 weights with AVX-512.
 *
 * VPERMW looks up 32 words: the products of all 16 codes with the scales of two rows, which lines
 * of a strip have in turn. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_BF16)
#include "../gemm/bf16_strip_avx512.h"
#include "fp4.h"

/* Words 0 to 15: codes of the even row, 16 to 31: of the odd one. Numbers that bf16 holds lose
 * nothing where the lower half of binary32 is cut off. */
KT_INLINE __m512i pair_table(__m512 numbers, const float *scale) {
  const __m512i even = _mm512_castps_si512(_mm512_mul_ps(numbers, _mm512_set1_ps(scale[0])));
  const __m512i odd = _mm512_castps_si512(_mm512_mul_ps(numbers, _mm512_set1_ps(scale[1])));
  return _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(even, 16))),
      _mm512_cvtepi32_epi16(_mm512_srli_epi32(odd, 16)), 1);
}

/* The low nibbles of words, in odd words from the upper half of the table. */
KT_INLINE __m512i look_up(__m512i table, __m512i words) {
  const __m512i nibble = _mm512_set1_epi32(0x000f000f), odd = _mm512_set1_epi32(0x00100000);
  return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(words, nibble, odd, 0xea), table);
}

/* Line q of both halves: columns 4p and 4p + 1 are in the low nibble of words, two more 8 bits
 * higher; of kt_row_pairs, lines p < 4 are even 64-bit words. */
KT_INLINE void store_numbers(__m512i table, __m512i words, uint8_t *tile, int q) {
  const __m512i first = look_up(table, words);
  const __m512i last = look_up(table, _mm512_srli_epi16(words, 8));
  kt_store_lines(tile, q, _mm512_unpacklo_epi64(first, last), _mm512_unpackhi_epi64(first, last));
}

KT_INLINE void transpose_tile(__m512 numbers, const uint8_t *codes, const float *scale,
                              uint8_t *tile) {
  __m512i pair[8];
  kt_row_pairs(1, codes, pair);
  for (int j = 0; j < 8; j++) {
    const __m512i upper = _mm512_srli_epi16(pair[j], 4);
    store_numbers(pair_table(numbers, scale + 2 * j), pair[j], tile, j);
    store_numbers(pair_table(numbers, scale + KT_HALF_ROWS + 2 * j), upper, tile, 8 + j);
  }
}

void kt_mxfp4_transpose_avx512(const kt_weight *w, int64_t column, uint8_t *strip) {
  const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)kt_fp4_bf16);
  const __m512 numbers = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  const int64_t strip_size = w->cols * KT_STRIP / 2, g = column / KT_MXFP4_GROUP;
  const int scaled = w->layout.scale_dtype == KT_SCALE_UE8M0;
  const uint8_t *codes = w->codes + kt_bf16_tile_start(w->cols, KT_FP4_TILE, 0, column);
  float scale[KT_STRIP];
  for (int i = 0; i < KT_STRIP; i++) scale[i] = 1.0f;
  for (int64_t n = 0; n < w->rows; n += KT_STRIP, codes += strip_size, strip += KT_BF16_TILE) {
    const int64_t at = kt_group_scale_index(w->cols, KT_MXFP4_GROUP, n, g);
    kt_prefetch_tile(codes, KT_TILES_AHEAD * strip_size, KT_FP4_TILE);
    if (scaled) kt_mxfp4_decode_scales(w, at, KT_STRIP, scale);
    transpose_tile(numbers, codes, scale, strip);
  }
}

KT_TARGET_END
#endif
