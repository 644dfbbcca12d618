/* The LoRA matrices of a call. */
#include "adapter.h"

#include "../bf16/bf16.h"
#include "../cpu.h"
#include "../simd/bits.h"

#include <math.h>
#include <string.h>

static const kt_layout bf16_layout = {KT_FORMAT_BF16, 0, KT_SCALE_NONE};

static int64_t whole_tiles(int64_t cols) { return kt_ceil_div(cols, KT_TILE_COLS) * KT_TILE_COLS; }

static kt_status check_pair(const kt_lora *lora, const void *a, const void *b) {
  const size_t size = lora->dtype == KT_F32 ? 4 : 2;
  if (!a != !b) return KT_ERR_ARGUMENT;
  return kt_aligned(a, size) && kt_aligned(b, size) ? KT_OK : KT_ERR_ARGUMENT;
}

/* Of B A, where dropout leaves an element. */
static float factor_of(const kt_lora *lora) { return lora->scale / (1.0f - lora->dropout); }

kt_status kt_check_lora(const kt_moe *moe, const kt_lora *lora) {
  if (!lora) return KT_OK;
  if (lora->rank < 1 || lora->rank > KT_MAX_RANK ||
      !(lora->dropout >= 0.0f && lora->dropout < 1.0f) || !isfinite(factor_of(lora)) ||
      (lora->dtype != KT_BF16 && lora->dtype != KT_F32))
    return KT_ERR_ARGUMENT;
  if (!kt_has_gate(moe->activation.function) && (lora->gate_a || lora->gate_b))
    return KT_ERR_ARGUMENT;
  const int good = check_pair(lora, lora->gate_a, lora->gate_b) == KT_OK &&
                   check_pair(lora, lora->up_a, lora->up_b) == KT_OK &&
                   check_pair(lora, lora->down_a, lora->down_b) == KT_OK;
  return good ? KT_OK : KT_ERR_ARGUMENT;
}

/* The chance as a number of 32 bits; a chance above 0 is at least 1. */
static uint32_t below(float chance) {
  const double bits = ceil((double)chance * 0x1p32);
  return bits < 0x1p32 ? (uint32_t)bits : UINT32_MAX;
}

kt_adapter kt_adapter_of(const kt_moe *moe, const kt_lora *lora) {
  kt_adapter a = {.lora = lora,
                  .moe = moe,
                  .strips = KT_CELL(kt_strips_of),
                  .math = KT_CELL(kt_gradients_of),
                  .product = kt_format_product(&kt_bf16_format),
                  .add = kt_bf16_adding_product(),
                  .add_beside = kt_bf16_adding_stream()};
  if (!lora) return a;
  a.rank = lora->rank;
  a.pair_cols = whole_tiles(2 * lora->rank), a.cols = whole_tiles(lora->rank);
  a.factor = factor_of(lora);
  a.drop_x = (kt_drop){lora->seed, below(lora->dropout), 0};
  a.drop_middle = (kt_drop){lora->seed, below(lora->dropout), 1};
  return a;
}

static const void *a_of(const kt_lora *lora, kt_projection projection) {
  return projection == KT_GATE ? lora->gate_a : projection == KT_UP ? lora->up_a : lora->down_a;
}

static const void *b_of(const kt_lora *lora, kt_projection projection) {
  return projection == KT_GATE ? lora->gate_b : projection == KT_UP ? lora->up_b : lora->down_b;
}

kt_rows_kind kt_rows_of(const kt_moe *moe, const kt_adapter *a) {
  const int rounded = a->lora && kt_rounded_best(&moe->layout);
  return rounded ? KT_ROWS_BF16 : kt_format_of(&moe->layout)->rows_kind;
}

int kt_adapts(const kt_adapter *a, kt_projection projection) {
  return a->lora && a_of(a->lora, projection);
}

int kt_adapts_x(const kt_adapter *a) { return kt_adapts(a, KT_GATE) || kt_adapts(a, KT_UP); }

static kt_plain matrix_of(const kt_adapter *a, const void *stack, int64_t expert, int64_t rows,
                          int64_t cols) {
  const size_t size = a->lora->dtype == KT_F32 ? 4 : 2;
  const uint8_t *const data = (const uint8_t *)stack + (size_t)(expert * rows * cols) * size;
  return (kt_plain){data, rows, cols, a->lora->dtype};
}

kt_plain kt_lora_a(const kt_adapter *a, kt_projection projection, int64_t expert) {
  const int64_t inputs = projection == KT_DOWN ? a->moe->intermediate : a->moe->hidden;
  return matrix_of(a, a_of(a->lora, projection), expert, a->rank, inputs);
}

kt_plain kt_lora_b(const kt_adapter *a, kt_projection projection, int64_t expert) {
  const int64_t outputs = projection == KT_DOWN ? a->moe->hidden : a->moe->intermediate;
  return matrix_of(a, b_of(a->lora, projection), expert, outputs, a->rank);
}

/* Two strips, of which at most one has a number other than zero in any place. */
static void unite(uint8_t *out, const uint8_t *other, int64_t size) {
  uint64_t *const to = (uint64_t *)(void *)out;
  const uint64_t *const from = (const uint64_t *)(const void *)other;
  for (int64_t i = 0; i < size / 8; i++) to[i] |= from[i];
}

/* The strip of gate's matrix, up's, or both. first: in what `place` makes of each. */
static void pair_strip(const kt_adapter *a, int64_t expert, kt_strip_fn *place, int by_rows,
                       int64_t strip, int64_t count, uint8_t *out, uint8_t *spare) {
  const int64_t first = strip * KT_STRIP;
  int filled = 0;
  for (kt_projection p = KT_GATE; p <= KT_UP; p++) {
    const int64_t behind = p == KT_UP ? a->rank : 0;
    const int outside = by_rows && (first + KT_STRIP <= behind || first >= behind + a->rank);
    if (!kt_adapts(a, p) || outside) continue;
    const kt_plain m = kt_lora_a(a, p, expert);
    place(&m, by_rows ? first - behind : first, by_rows ? 0 : behind, count, filled ? spare : out);
    if (filled) unite(out, spare, count * KT_STRIP * 2);
    filled = 1;
  }
  if (!filled) memset(out, 0, (size_t)count * KT_STRIP * 2);
}

void kt_pair_a_strip(const kt_adapter *a, int64_t expert, int64_t strip, uint8_t *out,
                     uint8_t *spare) {
  pair_strip(a, expert, a->strips->rows, 1, strip, a->moe->hidden, out, spare);
}

void kt_pair_a_columns(const kt_adapter *a, int64_t expert, int64_t strip, uint8_t *out,
                       uint8_t *spare) {
  pair_strip(a, expert, a->strips->columns, 0, strip, a->pair_cols, out, spare);
}

kt_pair_side kt_side_of(const kt_adapter *a, kt_projection projection) {
  const int64_t behind = projection == KT_UP ? a->rank : 0;
  if (projection == KT_DOWN) return (kt_pair_side){0, 0, a->cols};
  if (a->rank % KT_TILE_COLS == 0) return (kt_pair_side){2 * behind, 0, a->rank};
  return (kt_pair_side){0, behind, a->pair_cols};
}

void kt_b_strips(const kt_adapter *a, kt_projection projection, int64_t expert, int64_t first,
                 int64_t strips, uint8_t *out) {
  const kt_plain m = kt_lora_b(a, projection, expert);
  const kt_pair_side side = kt_side_of(a, projection);
  for (int64_t s = 0; s < strips; s++)
    a->strips->rows(&m, first + s * KT_STRIP, side.shift, side.cols,
                    out + s * side.cols * KT_STRIP * 2);
}

kt_weight kt_strip_weight(const uint8_t *strips, int64_t number, int64_t cols) {
  return (kt_weight){strips, NULL, number * KT_STRIP, cols, bf16_layout};
}

void kt_scaled_row(const float *values, int64_t count, float factor, int64_t cols, uint16_t *out) {
  for (int64_t k = 0; k < count; k++) out[k] = kt_bf16_bits(values[k] * factor);
  for (int64_t k = count; k < cols; k++) out[k] = 0;
}
