/* int_gemm_avx2.h - products with integers and int8 activations for AVX2, which multiplies bytes
 * without a sign by bytes with one: pairs of products are added, cut to 16 bits.
 *
 *   4 bits   code + 8 times activation: at most 2 * 15 * 127, so that 8 lines fit into 16 bits.
 *            8 times the sum of activations is taken off last.
 *   8 bits   |code| times activation with the code's sign: at most 2 * 128 * 127.
 *
 * Both are exact: bits are those of the scalar products. A micro kernel does 16 rows (half a
 * strip) of up to 4 tokens, 32 columns after the other; more tokens read the strip again, from L2.
 *
 * Include after KT_TARGET_BEGIN(AVX2). */
#ifndef KT_INT_GEMM_AVX2_H
#define KT_INT_GEMM_AVX2_H

#include "../simd/unroll.h"
#include "group_gemm.h"
#include "int_gemm.h"

enum { KT_INT_BLOCK = 4, KT_INT_LINES = KT_TILE_COLS / 4 };

/* 32 columns of 16 rows: 8 lines, each with 4 columns of row 0, of row 1, ..., in bytes or in
 * nibbles that are shifted right by `shift`. */
typedef struct kt_int_segment {
  const uint8_t *lines;
  int apart, shift; /* bytes between two lines, bits */
} kt_int_segment;

/* Where columns k to k + 31 of rows n to n + 15 are. */
typedef kt_int_segment kt_int_segment_fn(const kt_weight *w, int64_t n, int64_t k);

/* What tells formats apart: constants of a micro kernel. */
typedef struct kt_int_form {
  int bits;
  int flip;    /* what stored codes are XORed with: code + 8, or codes in two's complement */
  int grouped; /* scales of groups, else of rows */
} kt_int_form;

KT_INLINE __m256i kt_int_line(const kt_int_form form, const uint8_t *at, __m128i shift) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)at);
  const __m256i flip = _mm256_set1_epi8((char)form.flip);
  if (form.bits == 8) return _mm256_xor_si256(bytes, flip);
  const __m256i codes = _mm256_and_si256(_mm256_srl_epi16(bytes, shift), _mm256_set1_epi8(15));
  return _mm256_xor_si256(codes, flip);
}

KT_INLINE __m256i kt_int_broadcast(const uint8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}

#define KT_INT_EACH_TOKEN                                                                          \
  KT_UNROLL(4)                                                                                     \
  for (int t = 0; t < KT_INT_BLOCK; t++)                                                           \
    if (t < tokens)

/* sum[t][8 rows, 8 more] += codes * x[t]. */
KT_INLINE void kt_int_add(const kt_int_form form, const int tokens, kt_int_segment s,
                          const uint8_t *x, int64_t stride, __m256i sum[KT_INT_BLOCK][2]) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m128i shift = _mm_cvtsi32_si128(s.shift);
  __m256i narrow[KT_INT_BLOCK][2];
  KT_INT_EACH_TOKEN narrow[t][0] = narrow[t][1] = _mm256_setzero_si256();
  for (int p = 0; p < KT_INT_LINES; p++, s.lines += s.apart, x += 4) {
    KT_UNROLL(2)
    for (int i = 0; i < 2; i++) {
      const __m256i w = kt_int_line(form, s.lines + 32 * i, shift);
      const __m256i size = _mm256_abs_epi8(w);
      KT_INT_EACH_TOKEN {
        const __m256i four = kt_int_broadcast(x + t * stride);
        if (form.bits == 4) {
          narrow[t][i] = _mm256_add_epi16(narrow[t][i], _mm256_maddubs_epi16(w, four));
        } else {
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four, w));
          sum[t][i] = _mm256_add_epi32(sum[t][i], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
  }
  if (form.bits == 4)
    KT_INT_EACH_TOKEN KT_UNROLL(2) for (int i = 0; i < 2; i++) sum[t][i] =
        _mm256_add_epi32(sum[t][i], _mm256_madd_epi16(narrow[t][i], ones));
}

/* Sums as floats, without what was added to codes; x_sum: of the activations. */
KT_INLINE __m256 kt_int_value(const kt_int_form form, __m256i sum, int32_t x_sum) {
  if (form.bits == 4) sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(8 * x_sum));
  return _mm256_cvtepi32_ps(sum);
}

/* Packed scales of 8 rows. */
KT_INLINE __m256 kt_int_scales(const kt_weight *w, int64_t at) {
  if (w->layout.scale_dtype == KT_SCALE_F32) return _mm256_loadu_ps((const float *)w->scale + at);
  const uint16_t *const from = (const uint16_t *)w->scale + at;
  const __m128i bits = _mm_loadu_si128((const __m128i *)(const void *)from);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

/* out[t][16 rows] of a matrix with scales of groups. */
KT_INLINE void kt_int_groups(const kt_int_form form, const int tokens, kt_int_segment_fn *segment,
                             const kt_weight *w, int64_t n, const uint8_t *x, int64_t stride,
                             float *out) {
  const int64_t group = w->layout.group, groups = w->cols / group;
  __m256 total[KT_INT_BLOCK][2];
  KT_INT_EACH_TOKEN total[t][0] = total[t][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; g++) {
    __m256i sum[KT_INT_BLOCK][2];
    KT_INT_EACH_TOKEN sum[t][0] = sum[t][1] = _mm256_setzero_si256();
    for (int64_t k = g * group; k < (g + 1) * group; k += KT_TILE_COLS)
      kt_int_add(form, tokens, segment(w, n, k), x + k, stride, sum);
    const int64_t at = kt_group_scale_index(w->cols, group, n, g);
    const __m256 scale[2] = {kt_int_scales(w, at), kt_int_scales(w, at + 8)};
    KT_INT_EACH_TOKEN {
      const uint8_t *const row = x + t * stride;
      const __m256 x_scale = _mm256_set1_ps(kt_group_x_scale(row, w->cols)[g]);
      const int32_t x_sum = kt_group_x_sum(row, w->cols, groups)[g];
      KT_UNROLL(2)
      for (int i = 0; i < 2; i++)
        total[t][i] = _mm256_fmadd_ps(kt_int_value(form, sum[t][i], x_sum),
                                      _mm256_mul_ps(scale[i], x_scale), total[t][i]);
    }
  }
  KT_INT_EACH_TOKEN {
    _mm256_storeu_ps(out + t * KT_STRIP, total[t][0]);
    _mm256_storeu_ps(out + t * KT_STRIP + 8, total[t][1]);
  }
}

/* The same with scales of rows. */
KT_INLINE void kt_int_rows(const kt_int_form form, const int tokens, kt_int_segment_fn *segment,
                           const kt_weight *w, int64_t n, const uint8_t *x, int64_t stride,
                           float *out) {
  const __m256 units = _mm256_set1_ps((float)kt_format_of(&w->layout)->scale_units);
  __m256i sum[KT_INT_BLOCK][2];
  KT_INT_EACH_TOKEN sum[t][0] = sum[t][1] = _mm256_setzero_si256();
  for (int64_t k = 0; k < w->cols; k += KT_TILE_COLS)
    kt_int_add(form, tokens, segment(w, n, k), x + k, stride, sum);
  KT_INT_EACH_TOKEN {
    const uint8_t *const row = x + t * stride;
    const __m256 x_scale = _mm256_set1_ps(kt_int_row_scale(row, w->cols));
    KT_UNROLL(2)
    for (int i = 0; i < 2; i++) {
      const __m256 scale = _mm256_mul_ps(units, kt_int_scales(w, n + 8 * i));
      const __m256 value = kt_int_value(form, sum[t][i], kt_int_row_sum(row, w->cols));
      _mm256_storeu_ps(out + t * KT_STRIP + 8 * i,
                       _mm256_mul_ps(_mm256_mul_ps(value, scale), x_scale));
    }
  }
}

KT_INLINE void kt_int_half(const kt_int_form form, const int tokens, kt_int_segment_fn *segment,
                           const kt_weight *w, int64_t n, const uint8_t *x, int64_t stride,
                           float *out) {
  if (form.grouped)
    kt_int_groups(form, tokens, segment, w, n, x, stride, out);
  else
    kt_int_rows(form, tokens, segment, w, n, x, stride, out);
}

/* kt_product_fn; `form` and `segment` are constants. */
KT_INLINE void kt_int_product_avx2(const kt_int_form form, kt_int_segment_fn *segment,
                                   const kt_weight *w, int64_t strip, int64_t strips,
                                   const uint8_t *x, int64_t stride, int64_t tokens, float *out) {
  const int64_t blocks = (tokens + KT_INT_BLOCK - 1) / KT_INT_BLOCK;
  for (int64_t s = 0; s < strips; s++)
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t half = 0; half < KT_STRIP; half += KT_HALF_ROWS) {
        const int64_t t = tokens * b / blocks, n = (strip + s) * KT_STRIP + half;
        const uint8_t *const row = x + t * stride;
        float *const to = out + (s * tokens + t) * KT_STRIP + half;
        switch (tokens * (b + 1) / blocks - t) {
        case 1: kt_int_half(form, 1, segment, w, n, row, stride, to); break;
        case 2: kt_int_half(form, 2, segment, w, n, row, stride, to); break;
        case 3: kt_int_half(form, 3, segment, w, n, row, stride, to); break;
        case 4: kt_int_half(form, 4, segment, w, n, row, stride, to); break;
        }
      }
}

#endif
