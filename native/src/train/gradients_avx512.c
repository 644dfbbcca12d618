/* What a backward pass does besides matrix products, with AVX-512; the same bits as
 * gradients_scalar.c. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512)
#include "../moe/activation_avx512.h"
#include "../quantize/rounding.h"
#include "../simd/transpose_avx512.h"
#include "gradients.h"
#include "random.h"

enum { BLOCK = 8 }; /* tokens whose middle is in the first cache */

KT_INLINE __m512 load_bf16(const void *at) {
  const __m256i half = _mm256_loadu_si256((const __m256i *)at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* bf16(x) in the upper half of each word; what is in the lower one counts for nothing. */
KT_INLINE __m512i rounded_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), half = _mm512_set1_epi32(0x7fff);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i less = _mm512_add_epi32(bits, half);
  const __m512i up = _mm512_mask_add_epi32(less, odd, less, _mm512_set1_epi32(1));
  return _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                               _mm512_set1_epi32(KT_F32_NAN));
}

/* 32 columns. */
typedef struct pair {
  __m512 low, high;
} columns;

KT_INLINE columns load_columns(const float *at) {
  return (columns){_mm512_loadu_ps(at), _mm512_loadu_ps(at + 16)};
}

KT_INLINE columns product_of(columns a, columns b) {
  return (columns){_mm512_mul_ps(a.low, b.low), _mm512_mul_ps(a.high, b.high)};
}

KT_INLINE void store_bf16(void *at, columns x) {
  const __m512i upper = _mm512_set_epi32(0x3f003d, 0x3b0039, 0x370035, 0x330031, 0x2f002d, 0x2b0029,
                                         0x270025, 0x230021, 0x1f001d, 0x1b0019, 0x170015, 0x130011,
                                         0x0f000d, 0x0b0009, 0x070005, 0x030001);
  _mm512_storeu_si512(at,
                      _mm512_permutex2var_epi16(rounded_bf16(x.low), upper, rounded_bf16(x.high)));
}

KT_INLINE __m512 nearest_bf16(__m512 x) {
  const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u);
  return _mm512_castsi512_ps(_mm512_and_si512(rounded_bf16(x), upper));
}

/* What the down product has read in the place of h, 16 columns from `first` on. */
KT_INLINE __m512 as_read(const kt_inner_back *in, int64_t t, int first, __m512 h) {
  if (!in->codes) return nearest_bf16(h);
  const int8_t *codes = in->codes + t * in->code_stride + first;
  const __m512i wide = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
  const __m512 scale = _mm512_set1_ps(in->code_scale[t * in->code_scale_stride]);
  return _mm512_mul_ps(_mm512_cvtepi32_ps(wide), scale);
}

/* In the order of the header, which _mm512_reduce_add_ps does not promise. */
KT_INLINE float sum_of_lanes(__m512 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  const float sum = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  return isnan(sum) ? kt_float(KT_F32_NAN) : sum;
}

/* Of a token. */
typedef struct middle {
  float h[KT_STRIP], gate_slope[KT_STRIP], up_slope[KT_STRIP];
} middle;

KT_INLINE void compute_middle(int function, const kt_activation *a, const kt_inner_back *in,
                              int64_t t, middle *m) {
  for (int64_t r = 0; r < KT_STRIP; r += 16) {
    const int64_t saved = t * in->saved_stride + r;
    const __m512 up = load_bf16(in->up + saved);
    const __m512 gate = kt_has_gate(function) ? load_bf16(in->gate + saved) : up;
    const kt_activated16 f = kt_activated_of16(function, a, gate, up);
    _mm512_storeu_ps(m->h + r, f.h);
    _mm512_storeu_ps(m->gate_slope + r, f.gate_slope);
    _mm512_storeu_ps(m->up_slope + r, f.up_slope);
  }
}

KT_INLINE columns weighted_sums(const kt_inner_back *in, int64_t t) {
  const __m512 weight = _mm512_set1_ps(in->weight[t]);
  columns d = load_columns(in->base + t * KT_STRIP);
  if (in->lora) {
    const columns lora = load_columns(in->lora + t * KT_STRIP);
    d = (columns){_mm512_add_ps(d.low, lora.low), _mm512_add_ps(d.high, lora.high)};
  }
  return (columns){_mm512_mul_ps(weight, d.low), _mm512_mul_ps(weight, d.high)};
}

KT_INLINE float dot_of(const kt_inner_back *in, int64_t t, columns h) {
  const columns base = load_columns(in->base + t * KT_STRIP);
  const __m512 sum = _mm512_mul_ps(base.low, as_read(in, t, 0, h.low));
  return sum_of_lanes(_mm512_fmadd_ps(base.high, as_read(in, t, 16, h.high), sum));
}

KT_INLINE void store_token(int function, const kt_inner_back *in, int64_t t, const middle *m) {
  const int64_t out = t * in->stride;
  const columns d = weighted_sums(in, t), h = load_columns(m->h);
  const columns gate = load_columns(m->gate_slope), up = load_columns(m->up_slope);
  if (kt_has_gate(function)) store_bf16(in->d_gate + out, product_of(d, gate));
  store_bf16(in->d_up + out, product_of(d, up));
  if (in->middle) store_bf16(in->middle + out, h);
  in->dot[t] = dot_of(in, t, h);
}

/* Two short loops, of which a CPU has more iterations under way than of a long one. Works on copies
 * of its arguments, which stores could otherwise change for all that the compiler knows. */
KT_INLINE void activate_back(int function, const kt_activation *activation,
                             const kt_inner_back *given) {
  const kt_activation a = *activation;
  const kt_inner_back in = *given;
  middle block[BLOCK];
  for (int64_t first = 0; first < in.tokens; first += BLOCK) {
    const int64_t end = first + BLOCK < in.tokens ? first + BLOCK : in.tokens;
    for (int64_t t = first; t < end; t++) compute_middle(function, &a, &in, t, block + t - first);
    for (int64_t t = first; t < end; t++) store_token(function, &in, t, block + t - first);
  }
}
KT_FOR_GATE_FUNCTIONS(KT_DEFINE_ACTIVATE_BACK)

/* ---- Sums of outer products ------------------------------------------------ */

/* `ranks` rows of 16 columns of out, from element (j, c) on. */
KT_INLINE void load_tile(const kt_outer *o, int64_t j, int64_t c, int ranks, __m512 *tile) {
  const float *out = o->out + j * o->row + c * o->col;
  __m512i line[16], column[16];
  if (o->fresh) {
    for (int r = 0; r < ranks; r++) tile[r] = _mm512_setzero_ps();
    return;
  }
  if (o->col == 1) {
    for (int r = 0; r < ranks; r++) tile[r] = _mm512_loadu_ps(out + r * o->row);
    return;
  }
  for (int i = 0; i < 16; i++)
    line[i] = _mm512_maskz_loadu_epi32((__mmask16)((1u << ranks) - 1), out + i * o->col);
  kt_transpose16(line, column);
  for (int r = 0; r < ranks; r++) tile[r] = _mm512_castsi512_ps(column[r]);
}

KT_INLINE void store_tile(const kt_outer *o, int64_t j, int64_t c, int ranks, const __m512 *tile) {
  float *out = o->out + j * o->row + c * o->col;
  __m512i line[16], column[16];
  if (o->col == 1) {
    for (int r = 0; r < ranks; r++) _mm512_storeu_ps(out + r * o->row, tile[r]);
    return;
  }
  for (int r = 0; r < 16; r++)
    line[r] = r < ranks ? _mm512_castps_si512(tile[r]) : _mm512_setzero_si512();
  kt_transpose16(line, column);
  for (int i = 0; i < 16; i++)
    _mm512_mask_storeu_epi32(out + i * o->col, (__mmask16)((1u << ranks) - 1), column[i]);
}

/* `ranks` times 16 * `vectors` elements of out, in registers from the first product to the last. */
KT_INLINE void outer_block(const kt_outer *o, int64_t j, int64_t c, int ranks, int vectors) {
  __m512 sum[2][16], row[2];
  for (int v = 0; v < vectors; v++) load_tile(o, j, c + 16 * v, ranks, sum[v]);
  for (int64_t i = 0; i < o->count; i++) {
    const float *a = o->a + i * o->a_stride + j;
    const uint8_t *b = o->b + (o->index ? o->index[i] : i) * o->b_stride + c * 2;
    for (int v = 0; v < vectors; v++) row[v] = load_bf16(b + 32 * v);
    for (int r = 0; r < ranks; r++)
      for (int v = 0; v < vectors; v++)
        sum[v][r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r]), row[v], sum[v][r]);
  }
  for (int v = 0; v < vectors; v++) store_tile(o, j, c + 16 * v, ranks, sum[v]);
}

/* 32 columns stay in the first cache for all ranks. */
static void outer(const kt_outer *given) {
  const kt_outer o = *given;
  for (int64_t c = 0; c < o.cols; c += 32) {
    int64_t j = 0;
    for (; j + 16 <= o.rank; j += 16) {
      outer_block(&o, j, c, 16, 1);
      outer_block(&o, j, c + 16, 16, 1);
    }
    if (o.rank & 8) outer_block(&o, j, c, 8, 2), j += 8;
    if (o.rank & 4) outer_block(&o, j, c, 4, 2), j += 4;
    if (o.rank & 2) outer_block(&o, j, c, 2, 2), j += 2;
    if (o.rank & 1) outer_block(&o, j, c, 1, 2);
  }
}

/* ---- What a forward keeps ------------------------------------------------------ */

/* Upper halves of words, on the side of `cut` that the value is on. */
KT_INLINE __m512i kept_bf16(__m512 value, __m512 cut) {
  const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000u), one = _mm512_set1_epi32(0x10000);
  const __m512i rounded = _mm512_and_si512(rounded_bf16(value), upper);
  const __m512 size = _mm512_abs_ps(_mm512_castsi512_ps(rounded));
  const __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_abs_ps(value), cut, _CMP_GT_OQ);
  const __mmask16 lies_beyond = _mm512_cmp_ps_mask(size, cut, _CMP_GT_OQ);
  const __m512i up = _mm512_mask_add_epi32(rounded, beyond & ~lies_beyond, rounded, one);
  return _mm512_mask_sub_epi32(up, lies_beyond & ~beyond, up, one);
}

/* Rows are far apart, and would be fetched when they are written. */
enum { ROWS_AHEAD = 8 };

static void keep(const kt_keep *given, int64_t first, int64_t end) {
  const kt_keep k = *given;
  const __m512i upper = _mm512_set_epi32(0x3f003d, 0x3b0039, 0x370035, 0x330031, 0x2f002d, 0x2b0029,
                                         0x270025, 0x230021, 0x1f001d, 0x1b0019, 0x170015, 0x130011,
                                         0x0f000d, 0x0b0009, 0x070005, 0x030001);
  const __m512 cut = _mm512_set1_ps(k.cut), none = _mm512_set1_ps(-0.0f); /* adds nothing */
  const __m512 bias0 = k.bias ? _mm512_loadu_ps(k.bias) : none;
  const __m512 bias16 = k.bias ? _mm512_loadu_ps(k.bias + 16) : none;
  for (int64_t t = first; t < end; t++) {
    const float *const from = k.products + t * KT_STRIP;
    if (t + ROWS_AHEAD < k.tokens)
      __asm__ volatile("prefetchw %0" ::"m"(k.rows[(t + ROWS_AHEAD) * k.stride]));
    const __m512 low = _mm512_add_ps(_mm512_loadu_ps(from), bias0);
    const __m512 high = _mm512_add_ps(_mm512_loadu_ps(from + 16), bias16);
    _mm512_storeu_si512(k.rows + t * k.stride, _mm512_permutex2var_epi16(kept_bf16(low, cut), upper,
                                                                         kept_bf16(high, cut)));
  }
}

/* ---- Dropout ----------------------------------------------------------------- */

KT_INLINE __m512i folded(__m512i x, int shift) {
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, (unsigned)shift));
}

KT_INLINE __m512i times(__m512i x, uint32_t factor) {
  return _mm512_mullo_epi32(x, _mm512_set1_epi32((int32_t)factor));
}

/* Which of 16 columns from `column` on stay. */
KT_INLINE __mmask16 kept(kt_row_key key, uint32_t below, int64_t column) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i second = _mm512_set1_epi32((int32_t)key.second);
  const uint32_t start = (uint32_t)column + key.first;
  __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32((int32_t)start));
  x = times(folded(x, KT_RANDOM_SHIFT_0), KT_RANDOM_FACTOR_0);
  x = _mm512_add_epi32(folded(x, KT_RANDOM_SHIFT_1), second);
  x = times(x, KT_RANDOM_FACTOR_1);
  x = times(folded(x, KT_RANDOM_SHIFT_2), KT_RANDOM_FACTOR_2);
  return _mm512_cmpge_epu32_mask(folded(x, KT_RANDOM_SHIFT_3), _mm512_set1_epi32((int32_t)below));
}

static void drop_bf16(const kt_drop *drop, int64_t pair, int64_t first, int64_t n, uint16_t *row) {
  const kt_row_key key = kt_key_of_row(drop->seed, pair, drop->input);
  for (int64_t i = 0; i < n; i += 16) {
    __m256i *at = (__m256i *)(void *)(row + i);
    const __mmask16 keep = kept(key, drop->below, first + i);
    _mm256_storeu_si256(at, _mm256_maskz_mov_epi16(keep, _mm256_loadu_si256(at)));
  }
}

static void drop_f32(const kt_drop *drop, int64_t pair, int64_t first, int64_t n, float *row) {
  const kt_row_key key = kt_key_of_row(drop->seed, pair, drop->input);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 keep = kept(key, drop->below, first + i);
    _mm512_storeu_ps(row + i, _mm512_maskz_mov_ps(keep, _mm512_loadu_ps(row + i)));
  }
}

const kt_gradients kt_gradients_avx512 = {
    {KT_FOR_GATE_FUNCTIONS(KT_ACTIVATE_BACK_CELL)}, outer, keep, drop_bf16, drop_f32};

KT_TARGET_END
#endif
