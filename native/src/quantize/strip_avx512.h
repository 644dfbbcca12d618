/* strip_avx512.h - what the AVX-512 packers share: a strip of 16 source rows, its row
 * maxima, 64 columns of 8-bit codes, and the 16x16 word transpose. */
#ifndef KT_STRIP_AVX512_H
#define KT_STRIP_AVX512_H

#include "../simd/transpose_avx512.h"
#include "layout.h"
#include "packed.h"
#include "rounding.h"

/* How the rows of a strip lie in memory, a compile-time constant in every loop below. */
enum { KT_ROW_BF16, KT_ROW_F32 };

typedef struct kt_strip {
  const uint8_t *data;
  int64_t row_size; /* bytes from one row to the next */
  int form;
} kt_strip;

/* Rows n..n+15: in place where they are plain bf16 or binary32, else decoded. */
KT_INLINE kt_strip kt_strip_at(const kt_matrix *m, int64_t n, float *scratch) {
  const int plain_f32 = m->dtype == KT_F32 && !m->round_to_bf16;
  if (m->col_stride == 1 && (m->dtype == KT_BF16 || plain_f32)) {
    const int64_t size = plain_f32 ? 4 : 2;
    return (kt_strip){(const uint8_t *)m->data + n * m->row_stride * size, m->row_stride * size,
                      plain_f32 ? KT_ROW_F32 : KT_ROW_BF16};
  }
  const int64_t stride = kt_scratch_stride(m->cols);
  kt_decode_rows_avx512(m, n, KT_STRIP_ROWS, scratch, stride);
  return (kt_strip){(const uint8_t *)scratch, stride * 4, KT_ROW_F32};
}

/* Bits of the largest magnitude of a row, widened to binary32; cols % 64 == 0. */
KT_INLINE uint32_t kt_row_max_avx512(const uint8_t *row, int64_t cols, int form) {
  const int64_t size = cols * (form == KT_ROW_BF16 ? 2 : 4);
  __m512i max0 = _mm512_setzero_si512(), max1 = max0;
  if (form == KT_ROW_BF16) {
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    for (int64_t at = 0; at < size; at += 128) {
      max0 = _mm512_max_epu16(max0, _mm512_and_si512(_mm512_loadu_si512(row + at), magnitude));
      max1 = _mm512_max_epu16(max1, _mm512_and_si512(_mm512_loadu_si512(row + at + 64), magnitude));
    }
    max0 = _mm512_max_epu16(max0, max1);
    const __m512i high = _mm512_and_si512(max0, _mm512_set1_epi32((int)0xffff0000u));
    return _mm512_reduce_max_epu32(_mm512_max_epu32(high, _mm512_slli_epi32(max0, 16)));
  }
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t at = 0; at < size; at += 128) {
    max0 = _mm512_max_epu32(max0, _mm512_and_si512(_mm512_loadu_si512(row + at), magnitude));
    max1 = _mm512_max_epu32(max1, _mm512_and_si512(_mm512_loadu_si512(row + at + 64), magnitude));
  }
  return _mm512_reduce_max_epu32(_mm512_max_epu32(max0, max1));
}

/* 16 values to 32-bit codes: one product, one rounding to even. With `flush`, denormal
 * values count as zero. */
KT_INLINE __m512i kt_round16(__m512i bits, __m512 inverse, int flush) {
  __m512 value = _mm512_castsi512_ps(bits);
  if (flush) {
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 normal = _mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    value = _mm512_maskz_mov_ps(normal, value);
  }
  enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
  return _mm512_cvt_roundps_epi32(_mm512_mul_round_ps(value, inverse, NEAREST), NEAREST);
}

/* 64 columns of a row from column k on as int8 codes. The saturating packs interleave the
 * four quarters of a vector, so that word j of 128-bit lane l holds the four columns of
 * group kt_group(form, l, j): the transpose below puts that right at no cost. */
KT_INLINE __m512i kt_round64(const uint8_t *row, int64_t k, __m512 inverse, int form, int flush) {
  __m512i a, b, c, d;
  if (form == KT_ROW_BF16) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low = _mm512_loadu_si512(row + 2 * k);
    const __m512i high = _mm512_loadu_si512(row + 2 * k + 64);
    a = _mm512_unpacklo_epi16(zero, low), b = _mm512_unpackhi_epi16(zero, low);
    c = _mm512_unpacklo_epi16(zero, high), d = _mm512_unpackhi_epi16(zero, high);
  } else {
    a = _mm512_loadu_si512(row + 4 * k), b = _mm512_loadu_si512(row + 4 * k + 64);
    c = _mm512_loadu_si512(row + 4 * k + 128), d = _mm512_loadu_si512(row + 4 * k + 192);
  }
  a = kt_round16(a, inverse, flush), b = kt_round16(b, inverse, flush);
  c = kt_round16(c, inverse, flush), d = kt_round16(d, inverse, flush);
  return _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
}

KT_INLINE int kt_group(int form, int lane, int word) {
  return form == KT_ROW_BF16 ? word / 2 * 8 + 2 * lane + word % 2 : 4 * word + lane;
}

/* Stores word (lane, j) of all 16 rows, in row order, as group kt_group(form, lane, j) of
 * the half tile at `to`. */
KT_INLINE void kt_store_transposed(const __m512i row[16], uint8_t *to, int form) {
  __m512i column[16];
  kt_transpose16(row, column);
  for (int lane = 0; lane < 4; lane++)
    for (int j = 0; j < 4; j++)
      _mm512_storeu_si512(to + KT_GROUP_STRIDE * kt_group(form, lane, j), column[4 * lane + j]);
}

/* A format, and where its tiles are, as constants of the loops below. */
typedef struct kt_tile_rule {
  int64_t tile_cols, block_rows, codes_per_byte;
} kt_tile_rule;

KT_INLINE int64_t kt_half_tile_at(const kt_matrix *m, kt_tile_rule rule, int64_t n, int64_t k) {
  return kt_tile_start(m->rows, m->cols, rule.block_rows, n, k) / rule.codes_per_byte +
         kt_half_tile(n);
}

/* One row of one tile, from column k on, as 64 bytes in the order of kt_round64. */
typedef __m512i kt_tile_row_fn(const uint8_t *row, int64_t k, __m512 inverse, int form, int flush);

/* A strip fills every other KiB of its tiles, which no hardware prefetcher follows: claim the
 * lines four tiles ahead (15 to 20 % on matrices beyond the caches). Past the end of the
 * buffer a prefetch does nothing. */
KT_INLINE void kt_prefetch_half_tile(const uint8_t *half_tile) {
  enum { AHEAD = 4 * 2 * KT_HALF_TILE };
  for (int at = AHEAD; at < AHEAD + KT_HALF_TILE; at += 64)
    __builtin_prefetch((const void *)((uintptr_t)half_tile + (uintptr_t)at), 1, 3);
}

KT_INLINE void kt_pack_strip(const kt_matrix *m, int64_t n, kt_strip strip, const float *inverse,
                             uint8_t *packed, kt_tile_rule rule, kt_tile_row_fn *tile_row, int form,
                             int flush) {
  for (int64_t k = 0; k < m->cols; k += rule.tile_cols) {
    __m512i bytes[KT_STRIP_ROWS];
    uint8_t *const half_tile = packed + kt_half_tile_at(m, rule, n, k);
    kt_prefetch_half_tile(half_tile);
    for (int r = 0; r < KT_STRIP_ROWS; r++)
      bytes[r] =
          tile_row(strip.data + r * strip.row_size, k, _mm512_set1_ps(inverse[r]), form, flush);
    kt_store_transposed(bytes, half_tile, form);
  }
}

/* Scales of rows n..n+15. Says through *flush whether denormals must be looked for. */
KT_INLINE kt_status kt_scale_strip(const kt_packer *packer, const kt_matrix *m, kt_strip strip,
                                   float *scale, float *inverse, int *flush) {
  *flush = 0;
  for (int r = 0; r < KT_STRIP_ROWS; r++) {
    const uint8_t *row = strip.data + r * strip.row_size;
    const uint32_t max = strip.form == KT_ROW_BF16 ? kt_row_max_avx512(row, m->cols, KT_ROW_BF16)
                                                   : kt_row_max_avx512(row, m->cols, KT_ROW_F32);
    if (max >= KT_NONFINITE_BITS) return KT_ERR_NONFINITE;
    scale[r] = packer->scale(kt_float(max));
    inverse[r] = kt_reciprocal(scale[r]);
    *flush |= max < KT_FLUSH_BITS;
  }
  return KT_OK;
}

/* The whole matrix: each strip is read from memory once, for its maxima, and quantized
 * from the cache. */
KT_INLINE kt_status kt_quantize_pack_strips(const kt_packer *packer, const kt_matrix *m,
                                            uint8_t *packed, float *scale, float *scratch,
                                            kt_tile_rule rule, kt_tile_row_fn *tile_row) {
  for (int64_t n = 0; n < m->rows; n += KT_STRIP_ROWS) {
    const kt_strip strip = kt_strip_at(m, n, scratch);
    float inverse[KT_STRIP_ROWS];
    int flush;
    const kt_status status = kt_scale_strip(packer, m, strip, scale + n, inverse, &flush);
    if (status) return status;
    if (strip.form == KT_ROW_BF16 && !flush)
      kt_pack_strip(m, n, strip, inverse, packed, rule, tile_row, KT_ROW_BF16, 0);
    else if (strip.form == KT_ROW_BF16)
      kt_pack_strip(m, n, strip, inverse, packed, rule, tile_row, KT_ROW_BF16, 1);
    else if (!flush)
      kt_pack_strip(m, n, strip, inverse, packed, rule, tile_row, KT_ROW_F32, 0);
    else
      kt_pack_strip(m, n, strip, inverse, packed, rule, tile_row, KT_ROW_F32, 1);
  }
  return KT_OK;
}

#endif
