/* Which product of a format runs, what the kernels can multiply with, and streams as products. */
#include "gemm.h"

#include "../format/format.h"
#include "../format/int_tiles.h"
#include "../format/scales.h"
#include "beside.h"
#include "epilogue.h"

kt_product_fn *kt_format_product(const kt_weight_format *format) {
  return KT_CELL(format->product);
}

kt_stream_fn *kt_format_stream(const kt_weight_format *format) {
  return format->stream[kt_isa_cell(format->product, sizeof *format->product)];
}

const kt_rounded *kt_rounded_best(const kt_layout *layout) {
  const kt_rounded *const rounded = kt_format_of(layout)->rounded;
  const int fits = rounded && layout->group <= rounded->most;
  return fits && kt_isa_active() == KT_ISA_AMX ? rounded : NULL;
}

int64_t kt_least_streamed(const kt_layout *layout) {
  const kt_weight_format *const format = kt_format_of(layout);
  const int level = kt_isa_cell(format->product, sizeof *format->product);
  return level == KT_ISA_AMX ? kt_least_tokens(layout) : format->least_avx512;
}

int64_t kt_least_tokens(const kt_layout *layout) {
#ifdef KT_LEAST_TOKENS
  return KT_LEAST_TOKENS; /* for benchmarks/sweep.py, which measures where AMX becomes faster */
#endif
  const kt_weight_format *const format = kt_format_of(layout);
  int i = 0;
  while (i < format->group_count - 1 && format->groups[i] != layout->group) i++;
  return format->least_tokens[i];
}

/* A row decoded by the scalar code fits the panel. */
_Static_assert(KT_MAX_COLS * sizeof(double) <= KT_PANEL_SIZE, "panel");

kt_status kt_product_check(const kt_layout *layout, int64_t rows, int64_t cols) {
  const kt_status status = kt_layout_check(layout, rows, cols);
  if (status) return status;
  if (!kt_format_of(layout)->product[KT_ISA_SCALAR]) return KT_ERR_UNSUPPORTED;
  return cols > KT_MAX_COLS ? KT_ERR_SHAPE : KT_OK;
}

/* ---- Streams -------------------------------------------------------------------- */

static int64_t add_region(kt_region *regions, int64_t count, int64_t most, const uint8_t *from,
                          int64_t size) {
  kt_region *const last = regions + count - 1;
  if (count > 0 && last->from + last->size == from) {
    last->size += size;
    return count;
  }
  if (count < most) regions[count++] = (kt_region){from, size};
  return count;
}

int64_t kt_strip_regions(const kt_weight *w, int64_t strip, int64_t strips, int64_t most,
                         kt_region *regions) {
  const kt_weight_format *const format = kt_format_of(&w->layout);
  const int64_t whole =
      KT_STRIP * (w->cols * format->bits / 8 + w->cols / KT_INNER_COLS * format->inner_scales);
  const int64_t block = format->block_rows ? KT_COL_BLOCK : w->cols;
  const int64_t scales =
      kt_scale_count(&w->layout, KT_STRIP, w->cols) * kt_scale_bytes(w->layout.scale_dtype);
  int64_t count = 0;
  for (int64_t s = strip; s < strip + strips; s++)
    for (int64_t k = 0; k < w->cols; k += block) {
      const int64_t cols = w->cols - k < block ? w->cols - k : block;
      const int64_t codes = format->block_rows ? kt_tile_start(w->rows, w->cols, format->block_rows,
                                                               s * KT_STRIP, k) *
                                                     format->bits / 8
                                               : s * whole;
      count = add_region(regions, count, most, w->codes + codes,
                         block == w->cols ? whole : KT_STRIP * cols * format->bits / 8);
    }
  if (w->layout.scale_dtype != KT_SCALE_NONE)
    count = add_region(regions, count, most, (const uint8_t *)w->scale + strip * scales,
                       strips * scales);
  return count;
}

enum { RING_SIZE = KT_BESIDE_RING, SPARE_SIZE = KT_BESIDE_SPARE };
_Static_assert(RING_SIZE + SPARE_SIZE <= KT_PANEL_SIZE, "a stream's memory lies in the panel");

void kt_streamed_product(kt_stream_fn *stream, const kt_weight *w, int64_t strip, int64_t strips,
                         const uint8_t *x, int64_t stride, int64_t tokens, float *out,
                         uint8_t *panel) {
  const kt_epilogue *const epilogue = KT_CELL(kt_epilogues);
  kt_beside beside = kt_beside_of(panel, panel + RING_SIZE);
  for (int64_t s = strip; s < strip + strips; s++, out += tokens * KT_STRIP) {
    kt_sums sums;
    const int more = s + 1 < w->rows / KT_STRIP;
    const int64_t regions =
        more ? kt_strip_regions(w, s + 1, 1, KT_BESIDE_REGIONS, beside.region) : 0;
    kt_beside_fetch(&beside, regions, 1);
    beside.following = s + 1 < strip + strips ? w : NULL, beside.following_strip = s + 1;
    stream(w, s, x, stride, tokens, &beside, out, &sums);
    epilogue->numbers(&sums, 0, tokens, out);
  }
  kt_beside_leave(&beside);
}
