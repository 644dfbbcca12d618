/* The table row of NVFP4 weights, their packing and their numbers. */
#include "fp4.h"

#include "../gemm/e4m3.h"
#include "../simd/bits.h"

/* The scale of (row n, columns of tile group g) in a tile. */
static int64_t scale_at(int64_t n, int64_t g) { return KT_FP4_TILE + g * KT_STRIP + n % KT_STRIP; }

static void pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile) {
  kt_fp4_pack_tile(codes, row_size, tile);
  for (int n = 0; n < KT_STRIP; n++, codes += row_size)
    for (int g = 0; g < KT_NVFP4_TILE_GROUPS; g++)
      tile[scale_at(n, g)] = codes[KT_TILE_COLS / 2 + g];
}

static void unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes) {
  (void)rows;
  for (int64_t k = 0; k < cols; k += KT_TILE_COLS, codes += KT_NVFP4_PLAIN) {
    const uint8_t *const tile = packed + kt_bf16_tile_start(cols, KT_NVFP4_TILE, n, k);
    kt_fp4_unpack_row(tile, n, codes);
    for (int g = 0; g < KT_NVFP4_TILE_GROUPS; g++)
      codes[KT_TILE_COLS / 2 + g] = tile[scale_at(n, g)];
  }
}

/* Of plain codes: whether no scale is a NaN. E4M3 has no infinity. */
static int is_finite(const uint8_t *codes, int64_t count) {
  int found = 0;
  for (int64_t k = 0; k < count; k += KT_TILE_COLS, codes += KT_NVFP4_PLAIN)
    for (int g = 0; g < KT_NVFP4_TILE_GROUPS; g++)
      found |= (codes[KT_TILE_COLS / 2 + g] & 0x7f) == 0x7f;
  return !found;
}

/* The code of (row n, column k) times its E4M3 scale. */
static double number_at(const kt_weight *w, int64_t n, int64_t k) {
  const uint8_t *const tile = w->codes + kt_bf16_tile_start(w->cols, KT_NVFP4_TILE, n, k);
  const unsigned scale = tile[scale_at(n, k % KT_TILE_COLS / KT_NVFP4_GROUP)];
  const double size = kt_bf16_value(kt_e4m3_bf16[scale & 0x7f]);
  return kt_bf16_value(kt_fp4_bf16[kt_fp4_code_at(tile, n, k)]) * (scale & 0x80 ? -size : size);
}

static void decode_row(const kt_weight *w, int64_t n, double *out) {
  const double scale = ((const float *)w->scale)[n];
  for (int64_t k = 0; k < w->cols; k++) out[k] = number_at(w, n, k) * scale;
}

static uint16_t number(const kt_weight *w, int64_t n, int64_t k) {
  return kt_bf16_bits((float)number_at(w, n, k));
}

const kt_weight_format kt_nvfp4_format = {
    .bits = 4,
    .plain_bits = 4,
    .inner_scales = KT_NVFP4_TILE_GROUPS,
    .col_multiple = KT_TILE_COLS,
    .group_count = 1,
    .groups = {0},
    .scale_dtypes = 1u << KT_SCALE_F32,
    .scale_rows = 1,
    .scale_units = 1,
    .unpack_row = unpack_row,
    .pack_tile = pack_tile,
    .is_finite = is_finite,
    .decode_row = decode_row,
    .number = number,
    .least_tokens = {4},
    KT_BF16_CELLS(nvfp4),
};
