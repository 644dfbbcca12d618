/* INT8 and INT4 products with AVX-512 VNNI, by VPDPBUSD.
 *
 * A 64-byte line of a half tile is 16 rows x 4 columns, so with 4 activations of a token
 * broadcast one instruction adds 4 columns to 16 rows. VPDPBUSD wants one side unsigned: codes
 * are biased (INT8 by 128, INT4 by 8) and sums start at -bias * (sum of the activations).
 *
 * A strip lies in one run of tiles per column block of 3584. Micro kernel: up to 12 tokens
 * x 32 rows in registers (24 sums), alternating between the half tiles, so that each broadcast
 * serves two lines. How a strip is read from memory differs:
 *
 *   Zen 4   by the first block of tokens, in strictly ascending order: one half tile after the
 *           other, one line for all tokens. Alternating reads DRAM at a third of its speed:
 * hardware prefetchers lose the stream (10 against 30 GB/s; software prefetching did not mend it).
 *           Further blocks find the strip in L2.
 *   others  beside all blocks of the strip before (moe/beside.h), alternating, in parts that go
 *           round several pages. (Sapphire Rapids, 2048 x 768, 64 experts, one core, balanced
 *           routing, weights on huge pages: the time of a layer where the first block prefetched
 *           4 KiB ahead instead, over this, with 2, 4, 8, 16, 32, 64 and 128 tokens an expert: INT4
 *           1.20, 1.09, 1.06, 1.27, 1.17, 1.07 and 1.0; INT8 0.93, 0.94, 1.02, 1.37, 1.46, 1.20 and
 *           1.10.) Few tokens of INT8, and single ones of INT4, still prefetch ahead.
 *
 * Columns are cut into blocks of K_BLOCK, so that those of the activations and of the strip stay in
 * L2 meanwhile; on others than Zen, where there is more than one block of tokens, into panels whose
 * biased codes stay in L1.
 *
 * `int4` is a constant in every call. */
#include "../cpu.h"

#if KT_X86
#include "../simd/target.h"

KT_TARGET_BEGIN(AVX512_VNNI)
#include "../gemm/int_gemm.h"
#include "../moe/beside.h"
#include "../simd/unroll.h"
#include "int.h"

enum {
  KT_INT_BLOCK = 12,      /* tokens of the micro kernel */
  KT_INT_K_BLOCK = 1792,  /* columns, half of KT_COL_BLOCK */
  KT_INT_AHEAD = 4096,    /* bytes by which weights are prefetched */
  KT_INT_PANEL_COLS = 512 /* that have biased codes in L1 */
};
_Static_assert(KT_INT_PANEL_COLS *KT_STRIP <= KT_BESIDE_RING, "a panel lies in the ring");

/* How a micro kernel reads weights. */
typedef enum kt_int_order {
  KT_INT_ASCENDING, /* from memory, Zen */
  KT_INT_AHEAD_OF,  /* from memory, others, few tokens */
  KT_INT_CACHED,    /* and what `beside` is to fetch, if anything, meanwhile */
  KT_INT_UNPACKING, /* the same, and biased codes are left in a panel */
  KT_INT_PANEL      /* the same, from that panel: as tiles of INT8 are laid out */
} kt_int_order;

/* (v ^ 8) & 15 in each byte: a two's complement nibble plus 8. */
KT_INLINE __m512i kt_int4_biased(__m512i v) {
  return _mm512_ternarylogic_epi32(v, _mm512_set1_epi8(8), _mm512_set1_epi8(15), 0x28);
}

/* Biased codes of a line; for INT4 the columns in the low (0) or high (1) nibbles. */
KT_INLINE __m512i kt_int_biased(__m512i line, const int int4, const int high) {
  if (!int4) return _mm512_xor_si512(line, _mm512_set1_epi8((char)0x80));
  return kt_int4_biased(high ? _mm512_srli_epi16(line, 4) : line);
}

KT_INLINE __m512i kt_int_broadcast(const uint8_t *x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

KT_INLINE void kt_int_prefetch(const uint8_t *at) {
  __builtin_prefetch((const void *)((uintptr_t)at + KT_INT_AHEAD), 0, 3);
}

/* sum += w * x. pinned: in the register that has the sum. Compilers else move sums to others and
 * back in each round, up to 40 moves for 384 products (AVX-512 without AMX, a layer of INT8: 1.5 %
 * slower). */
#define KT_INT_ADD(pinned, sum, w, x)                                                              \
  do {                                                                                             \
    if (pinned)                                                                                    \
      __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));                                 \
    else                                                                                           \
      (sum) = _mm512_dpbusd_epi32(sum, w, x);                                                      \
  } while (0)

/* Line g of one half tile for all tokens, or (both) of both half tiles. A macro, since
 * compilers keep sums in registers only if they see all of it as one function. */
#define KT_INT_LINE(half, both)                                                                    \
  for (int g = 0; g < 16; g++) {                                                                   \
    const uint8_t *const at = w + (half) * KT_HALF_TILE + g * KT_GROUP_STRIDE;                     \
    const __m512i line0 = _mm512_loadu_si512(at);                                                  \
    const __m512i line1 = (both) ? _mm512_loadu_si512(at + KT_HALF_TILE) : line0;                  \
    if (order == KT_INT_AHEAD_OF) {                                                                \
      kt_int_prefetch(at);                                                                         \
      kt_int_prefetch(at + KT_HALF_TILE);                                                          \
    }                                                                                              \
    _Pragma("GCC unroll 2") for (int high = 0; high <= int4; high++) {                             \
      const __m512i w0 = order == KT_INT_PANEL ? line0 : kt_int_biased(line0, int4, high);         \
      const __m512i w1 = order == KT_INT_PANEL ? line1                                             \
                         : (both)              ? kt_int_biased(line1, int4, high)                  \
                                               : w0;                                               \
      if (order == KT_INT_UNPACKING) {                                                             \
        _mm512_store_si512(panel + 2 * high * KT_HALF_TILE + g * KT_GROUP_STRIDE, w0);             \
        _mm512_store_si512(panel + (2 * high + 1) * KT_HALF_TILE + g * KT_GROUP_STRIDE, w1);       \
      }                                                                                            \
      _Pragma("GCC unroll 12") for (int t = 0; t < tokens; t++) {                                  \
        const __m512i four = kt_int_broadcast(base[t / 3] + t % 3 * stride + high * 64 + g * 4);   \
        __m512i(*const to)[2] = high && split ? more : acc;                                        \
        KT_INT_ADD(pinned, to[t][half], w0, four);                                                 \
        if (both) KT_INT_ADD(pinned, to[t][1], w1, four);                                          \
      }                                                                                            \
    }                                                                                              \
    KT_IN_ORDER;                                                                                   \
  }

/* sum[t][32 rows] += w[32 rows][columns of `tiles` tiles] * x[t][same columns] */
KT_INLINE void kt_int_micro(const int int4, const kt_int_order order, const int tokens,
                            const uint8_t *w, int64_t tiles, const uint8_t *x, int64_t stride,
                            kt_beside *beside, int32_t *sum) {
  const uint8_t *base[KT_INT_BLOCK / 3] = {x, x + 3 * stride, x + 6 * stride, x + 9 * stride};
  uint8_t *panel = order == KT_INT_UNPACKING ? beside->ring : NULL;
  /* Few tokens make few chains of sums: then high nibbles have sums of their own. */
  const int split = int4 && tokens <= 4;
  const int pinned = order >= KT_INT_UNPACKING;
  __m512i acc[KT_INT_BLOCK][2], more[KT_INT_BLOCK][2];
#pragma GCC unroll 12
  for (int t = 0; t < tokens; t++) {
    more[t][0] = more[t][1] = _mm512_setzero_si512();
    acc[t][0] = _mm512_loadu_si512(sum + t * KT_STRIP);
    acc[t][1] = _mm512_loadu_si512(sum + t * KT_STRIP + 16);
  }
  for (int64_t tile = 0; tile < tiles; tile++, w += 2 * KT_HALF_TILE) {
    if (order == KT_INT_ASCENDING) {
#pragma GCC unroll 16
      KT_INT_LINE(0, 0)
#pragma GCC unroll 16
      KT_INT_LINE(1, 0)
    } else {
#pragma GCC unroll 16
      KT_INT_LINE(0, 1)
    }
#pragma GCC unroll 4
    for (int p = 0; p < (tokens + 2) / 3; p++) base[p] += int4 ? 128 : 64;
    if (order == KT_INT_UNPACKING) panel += (int4 ? 4 : 2) * KT_HALF_TILE;
    if (order >= KT_INT_CACHED) {
      kt_beside_fetch_step(beside);
      if (int4) kt_beside_fetch_step(beside);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < tokens; t++) {
    _mm512_storeu_si512(sum + t * KT_STRIP, _mm512_add_epi32(acc[t][0], more[t][0]));
    _mm512_storeu_si512(sum + t * KT_STRIP + 16, _mm512_add_epi32(acc[t][1], more[t][1]));
  }
}

typedef void kt_int_micro_fn(const uint8_t *w, int64_t tiles, const uint8_t *x, int64_t stride,
                             kt_beside *beside, int32_t *sum);

/* Of a format, by tokens: for the first block of tokens, and those behind it. */
typedef struct kt_int_kernels {
  kt_int_micro_fn *const *first, *const *further;
} kt_int_kernels;

#define KT_INT_MICRO(n, name, int4, order)                                                         \
  KT_NOINLINE void name##n(const uint8_t *w, int64_t tiles, const uint8_t *x, int64_t stride,      \
                           kt_beside *beside, int32_t *sum) {                                      \
    kt_int_micro(int4, order, n, w, tiles, x, stride, beside, sum);                                \
  }

#define KT_INT_FEW(n, name, int4, few)                                                             \
  KT_NOINLINE void name##n(const uint8_t *w, int64_t tiles, const uint8_t *x, int64_t stride,      \
                           kt_beside *beside, int32_t *sum) {                                      \
    if (n < few) kt_int_micro(int4, KT_INT_AHEAD_OF, n, w, tiles, x, stride, beside, sum);         \
  }

#define KT_INT_MANY(n, name, int4, order)                                                          \
  KT_NOINLINE void name##n(const uint8_t *w, int64_t tiles, const uint8_t *x, int64_t stride,      \
                           kt_beside *beside, int32_t *sum) {                                      \
    if (n > KT_INT_BLOCK / 2 - 1) kt_int_micro(int4, order, n, w, tiles, x, stride, beside, sum);  \
  }

KT_1_TO_12(KT_INT_MANY, panel_, 0, KT_INT_PANEL)
static kt_int_micro_fn *const from_panel[] = {NULL, KT_1_TO_12(KT_NUMBERED, panel_)};

/* Defines <format>_unpacking, and kt_int_kernels <format>_few (fewer tokens than `few`),
 * <format>_streamed and <format>_zen. */
#define KT_INT_KERNELS(format, int4, few)                                                          \
  KT_1_TO_12(KT_INT_FEW, format##_ahead_, int4, few)                                               \
  KT_1_TO_12(KT_INT_MICRO, format##_ascending_, int4, KT_INT_ASCENDING)                            \
  KT_1_TO_12(KT_INT_MICRO, format##_cached_, int4, KT_INT_CACHED)                                  \
  KT_1_TO_12(KT_INT_MANY, format##_unpacking_, int4, KT_INT_UNPACKING)                             \
  static kt_int_micro_fn *const format##_unpacking[] = {                                           \
      NULL, KT_1_TO_12(KT_NUMBERED, format##_unpacking_)};                                         \
  static kt_int_micro_fn *const format##_ahead[] = {NULL,                                          \
                                                    KT_1_TO_12(KT_NUMBERED, format##_ahead_)};     \
  static kt_int_micro_fn *const format##_ascending[] = {                                           \
      NULL, KT_1_TO_12(KT_NUMBERED, format##_ascending_)};                                         \
  static kt_int_micro_fn *const format##_cached[] = {NULL,                                         \
                                                     KT_1_TO_12(KT_NUMBERED, format##_cached_)};   \
  static const kt_int_kernels format##_few = {format##_ahead, NULL},                               \
                              format##_streamed = {format##_cached, format##_cached},              \
                              format##_zen = {format##_ascending, format##_cached};

/* Columns k .. k + cols of one strip for all tokens, in blocks of nearly equal size. */
KT_INLINE void kt_int_strip(const int int4, const kt_int_kernels *kernels, const kt_weight *w,
                            int64_t strip, int64_t k, int64_t cols, const uint8_t *x,
                            int64_t stride, int64_t tokens, kt_beside *beside, int32_t *sum) {
  const int64_t tile_cols = int4 ? KT_INT4_TILE_COLS : KT_INT8_TILE_COLS;
  const int64_t block_rows = int4 ? KT_INT4_BLOCK_ROWS : KT_INT8_BLOCK_ROWS;
  const int64_t start = kt_tile_start(w->rows, w->cols, block_rows, strip * KT_STRIP, k);
  const uint8_t *const tiles = w->codes + (int4 ? start / 2 : start);
  const int64_t blocks = (tokens + KT_INT_BLOCK - 1) / KT_INT_BLOCK;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t t = tokens * b / blocks, count = tokens * (b + 1) / blocks - t;
    kt_int_micro_fn *const micro = (b == 0 ? kernels->first : kernels->further)[count];
    micro(tiles, cols / tile_cols, x + t * stride + k, stride, beside, sum + t * KT_STRIP);
  }
}

KT_INLINE void kt_int_start(const int bias, const uint8_t *x, int64_t cols, int64_t stride,
                            int64_t strips, int64_t tokens, int32_t *sum) {
  for (int64_t t = 0; t < tokens; t++) {
    const __m512i start = _mm512_set1_epi32(
        (int32_t)(0u - (uint32_t)bias * (uint32_t)kt_int_row_sum(x + t * stride, cols)));
    for (int64_t s = 0; s < strips; s++) {
      _mm512_storeu_si512(sum + (s * tokens + t) * KT_STRIP, start);
      _mm512_storeu_si512(sum + (s * tokens + t) * KT_STRIP + 16, start);
    }
  }
}

/* From integer sums to products, in place. */
KT_INLINE void kt_int_finish(float step, const float *scale, const uint8_t *x, int64_t cols,
                             int64_t stride, int64_t tokens, float *out) {
  const __m512 w0 = _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale));
  const __m512 w16 = _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale + 16));
  for (int64_t t = 0; t < tokens; t++, out += KT_STRIP) {
    const __m512 xt = _mm512_set1_ps(kt_int_row_scale(x + t * stride, cols));
    const __m512 v0 = _mm512_cvtepi32_ps(_mm512_loadu_si512(out));
    const __m512 v16 = _mm512_cvtepi32_ps(_mm512_loadu_si512(out + 16));
    _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_mul_ps(v0, w0), xt));
    _mm512_storeu_ps(out + 16, _mm512_mul_ps(_mm512_mul_ps(v16, w16), xt));
  }
}

KT_INLINE void kt_int_product_avx512(const int int4, const kt_int_kernels *kernels,
                                     const kt_weight *w, int64_t strip, int64_t strips,
                                     const uint8_t *x, int64_t stride, int64_t tokens, float *out) {
  int32_t *const sum = (int32_t *)(void *)out;
  kt_beside nothing = kt_beside_of(NULL, NULL);
  const int64_t k_block = tokens <= KT_INT_BLOCK ? KT_COL_BLOCK : KT_INT_K_BLOCK;
  kt_int_start(int4 ? 8 : 128, x, w->cols, stride, strips, tokens, sum);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    const int64_t left = w->cols - k;
    cols = left < k_block ? left : k_block;
    for (int64_t s = 0; s < strips; s++)
      kt_int_strip(int4, kernels, w, strip + s, k, cols, x, stride, tokens, &nothing,
                   sum + s * tokens * KT_STRIP);
  }
  for (int64_t s = 0; s < strips; s++)
    kt_int_finish(int4 ? 16.0f : 1.0f, (const float *)w->scale + (strip + s) * KT_STRIP, x, w->cols,
                  stride, tokens, out + s * tokens * KT_STRIP);
}

/* The same for more tokens than a block: the first one biases the codes of some columns, and leaves
 * them in L1 for the others, which then do nothing but multiply. VPDPBUSD starts on two ports,
 * which biasing takes as well: 1 of 13 of their slots for INT8, 1 of 9 for INT4. */
KT_INLINE void kt_int_panels(const int int4, kt_int_micro_fn *const *unpacking, const kt_weight *w,
                             int64_t strip, int64_t k, int64_t cols, const uint8_t *x,
                             int64_t stride, int64_t tokens, kt_beside *beside, int32_t *sum) {
  const int64_t tile_cols = int4 ? KT_INT4_TILE_COLS : KT_INT8_TILE_COLS;
  const int64_t block_rows = int4 ? KT_INT4_BLOCK_ROWS : KT_INT8_BLOCK_ROWS;
  const int64_t start = kt_tile_start(w->rows, w->cols, block_rows, strip * KT_STRIP, k);
  const uint8_t *const codes = w->codes + (int4 ? start / 2 : start);
  const int64_t blocks = (tokens + KT_INT_BLOCK - 1) / KT_INT_BLOCK, tiles = cols / tile_cols;
  const int64_t panels = (cols + KT_INT_PANEL_COLS - 1) / KT_INT_PANEL_COLS;
  for (int64_t p = 0; p < panels; p++) {
    const int64_t tile = tiles * p / panels, count = tiles * (p + 1) / panels - tile;
    const uint8_t *const from = x + k + tile * tile_cols;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t t = tokens * b / blocks, of = tokens * (b + 1) / blocks - t;
      if (b == 0)
        unpacking[of](codes + tile * 2 * KT_HALF_TILE, count, from, stride, beside, sum);
      else
        from_panel[of](beside->ring, count * (int4 + 1), from + t * stride, stride, beside,
                       sum + t * KT_STRIP);
    }
  }
}

/* kt_stream_fn of <format>_streamed. */
KT_INLINE void kt_int_stream_avx512(const int int4, const kt_int_kernels *kernels,
                                    kt_int_micro_fn *const *unpacking, const kt_weight *w,
                                    int64_t strip, const uint8_t *x, int64_t stride, int64_t tokens,
                                    kt_beside *beside, int32_t *sum, kt_sums *sums) {
  const int64_t blocks = (tokens + KT_INT_BLOCK - 1) / KT_INT_BLOCK;
  kt_beside_finish(beside); /* while the sums of the strip before are in L1 */
  kt_beside_start(beside, w->cols / KT_INT8_TILE_COLS * blocks);
  kt_int_start(int4 ? 8 : 128, x, w->cols, stride, 1, tokens, sum);
  for (int64_t k = 0, cols; k < w->cols; k += cols) {
    const int64_t left = w->cols - k;
    cols = left < KT_COL_BLOCK ? left : KT_COL_BLOCK;
    if (blocks == 1)
      kt_int_strip(int4, kernels, w, strip, k, cols, x, stride, tokens, beside, sum);
    else
      kt_int_panels(int4, unpacking, w, strip, k, cols, x, stride, tokens, beside, sum);
  }
  *sums = (kt_sums){.sum = sum,
                    .whole = 1,
                    .step = int4 ? 16.0f : 1.0f,
                    .tokens = tokens,
                    .row_scale = (const float *)w->scale + strip * KT_STRIP,
                    .x_scale = x + w->cols,
                    .stride = stride};
}

/* Defines the kt_stream_fn and the kt_product_fn of a format. */
#define KT_INT_PRODUCTS(format, int4, least)                                                       \
  KT_INT_KERNELS(format, int4, least)                                                              \
  void kt_##format##_stream_avx512(const kt_weight *w, int64_t strip, const uint8_t *x,            \
                                   int64_t stride, int64_t tokens, kt_beside *beside, void *out,   \
                                   kt_sums *sums) {                                                \
    kt_int_stream_avx512(int4, &format##_streamed, format##_unpacking, w, strip, x, stride,        \
                         tokens, beside, out, sums);                                               \
  }                                                                                                \
  void kt_##format##_product_avx512(const kt_weight *w, int64_t strip, int64_t strips,             \
                                    const uint8_t *x, int64_t stride, int64_t tokens, float *out,  \
                                    uint8_t *panel) {                                              \
    if (tokens < least)                                                                            \
      kt_int_product_avx512(int4, &format##_few, w, strip, strips, x, stride, tokens, out);        \
    else                                                                                           \
      kt_streamed_product(kt_##format##_stream_avx512, w, strip, strips, x, stride, tokens, out,   \
                          panel);                                                                  \
  }                                                                                                \
  void kt_##format##_product_zen(const kt_weight *w, int64_t strip, int64_t strips,                \
                                 const uint8_t *x, int64_t stride, int64_t tokens, float *out,     \
                                 uint8_t *panel) {                                                 \
    (void)panel;                                                                                   \
    kt_int_product_avx512(int4, &format##_zen, w, strip, strips, x, stride, tokens, out);          \
  }

KT_INT_PRODUCTS(int8, 0, KT_INT8_LEAST_STREAMED)
KT_INT_PRODUCTS(int4, 1, KT_INT4_LEAST_STREAMED)

KT_TARGET_END
#endif
