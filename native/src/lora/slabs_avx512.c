/* Products of slabs with AVX-512: four rows at a time, so that a line is loaded once for them. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../simd/unroll.h"
#include "slabs.h"

enum { BLOCK = 4, AHEAD = 2048 /* bytes by which a slab is prefetched */ };

KT_INLINE void add_line(const int tokens, const uint8_t *line, const float *const *x, int64_t at,
                        __m512 sum[BLOCK][4], const int first) {
  const __m512i pair = _mm512_loadu_si512(line);
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
  const __m512 odd =
      _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000)));
  _mm_prefetch((const char *)line + AHEAD, _MM_HINT_T0);
  KT_UNROLL(4)
  for (int t = 0; t < tokens; t++) {
    sum[t][first] = _mm512_fmadd_ps(even, _mm512_set1_ps(x[t][at]), sum[t][first]);
    sum[t][first + 1] = _mm512_fmadd_ps(odd, _mm512_set1_ps(x[t][at + 1]), sum[t][first + 1]);
  }
}

/* sum += even + odd, which are 0 then. */
KT_INLINE void end_block(const int tokens, __m512 block[BLOCK][4], const int first,
                         __m512 sum[BLOCK]) {
  KT_UNROLL(4)
  for (int t = 0; t < tokens; t++) {
    sum[t] = _mm512_add_ps(sum[t], _mm512_add_ps(block[t][first], block[t][first + 1]));
    block[t][first] = block[t][first + 1] = _mm512_setzero_ps();
  }
}

/* `tokens` is a constant. Two blocks of lines at a time, whose sums do not wait for each other. */
KT_INLINE void multiply_slab(const int tokens, const uint8_t *slab, int64_t lines,
                             const float *const *rows, float *const *out, int64_t at) {
  enum { SIZE = KT_SLAB_BLOCK * KT_SLAB_LINE };
  __m512 block[BLOCK][4], sum[BLOCK];
  const float *x[BLOCK];
  int64_t q = 0;
  KT_UNROLL(4)
  for (int t = 0; t < tokens; t++) {
    x[t] = rows[t];
    sum[t] = _mm512_setzero_ps();
    for (int j = 0; j < 4; j++) block[t][j] = _mm512_setzero_ps();
  }
  for (; q + 2 * KT_SLAB_BLOCK <= lines; q += 2 * KT_SLAB_BLOCK) {
    for (int64_t i = q; i < q + KT_SLAB_BLOCK; i++) {
      add_line(tokens, slab + i * KT_SLAB_LINE, x, 2 * i, block, 0);
      add_line(tokens, slab + i * KT_SLAB_LINE + SIZE, x, 2 * (i + KT_SLAB_BLOCK), block, 2);
    }
    end_block(tokens, block, 0, sum);
    end_block(tokens, block, 2, sum);
  }
  while (q < lines) {
    const int64_t end = q + KT_SLAB_BLOCK < lines ? q + KT_SLAB_BLOCK : lines;
    for (; q < end; q++) add_line(tokens, slab + q * KT_SLAB_LINE, x, 2 * q, block, 0);
    end_block(tokens, block, 0, sum);
  }
  KT_UNROLL(4)
  for (int t = 0; t < tokens; t++) _mm512_storeu_ps(out[t] + at, sum[t]);
}

KT_INLINE void multiply_slabs(const int tokens, const kt_slabs_at *p, const float *const *rows,
                              float *const *out, int64_t step) {
  for (int64_t n = 0; n < p->count; n++)
    multiply_slab(tokens, p->slab + n * p->apart, p->lines, rows, out,
                  n / 2 * step + n % 2 * KT_SLAB_ROWS);
}

void kt_slabs_avx512(const kt_slabs_at *p, const float *const *rows, int64_t tokens,
                     float *const *out, int64_t step) {
  for (; tokens >= BLOCK; tokens -= BLOCK, rows += BLOCK, out += BLOCK)
    multiply_slabs(BLOCK, p, rows, out, step);
  if (tokens == 3) multiply_slabs(3, p, rows, out, step);
  if (tokens == 2) multiply_slabs(2, p, rows, out, step);
  if (tokens == 1) multiply_slabs(1, p, rows, out, step);
}

const kt_slab_math kt_slab_math_avx512 = {.rows = kt_slabs_avx512};

KT_TARGET_END
#endif
