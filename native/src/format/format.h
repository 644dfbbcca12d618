/* format.h - what a weight format consists of: one row of the table in format.c.
 *
 * Sizes, checks and the order of scales follow from the data of a row. Its functions place
 * the codes of one row of a matrix; choosing codes (quantize/) and multiplying with them
 * (moe/gemm.h) are cells that may be missing. */
#ifndef KT_FORMAT_H
#define KT_FORMAT_H

#include "../moe/gemm.h"
#include "ktconv.h"

enum {
  KT_ROW_MULTIPLE = 32, /* rows of every packed matrix are a multiple of this */
  KT_INNER_COLS = 32    /* columns that `inner_scales` belong to */
};

typedef struct kt_weight_format kt_weight_format;

/* Quantizes and packs a whole matrix. All arguments were checked. KT_OK, or KT_ERR_NONFINITE
 * without a position. */
typedef kt_status kt_quantize_pack_fn(const kt_layout *layout, const kt_matrix *matrix,
                                      const kt_choice *choice, uint8_t *packed, void *packed_scale,
                                      float *scratch);

/* Plain codes of row n of a [rows, cols] matrix, to and from their places in packed bytes. Rows
 * are packed in ascending order, so that a byte shared by two rows is written by the first. */
typedef void kt_pack_row_fn(const uint8_t *codes, int64_t rows, int64_t cols, int64_t n,
                            uint8_t *packed);
typedef void kt_unpack_row_fn(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                              uint8_t *codes);

/* 32 rows, `row_size` bytes apart, x 32 columns of plain codes as a tile (gemm/bf16_gemm.h). */
typedef void kt_pack_tile_fn(const uint8_t *codes, size_t row_size, uint8_t *tile);

struct kt_weight_format {
  /* Codes: bits of a packed one, bits of a plain one, bytes of scales that are among the codes of
   * 32 columns of a row (packed and plain), what cols must be a multiple of beside the group. */
  int32_t bits, plain_bits, inner_scales, col_multiple;
  /* Scales: allowed groups (0: one per row), allowed dtypes as a set of 1 << kt_scale_dtype, and
   * the rows that share a scale where group is not 0. */
  int32_t group_count, groups[3];
  uint32_t scale_dtypes;
  int32_t scale_rows;

  kt_pack_row_fn *pack_row; /* NULL: pack_tile is there, and no quantizer */
  kt_unpack_row_fn *unpack_row;
  kt_pack_tile_fn *pack_tile; /* NULL, or the same as pack_row of 32 rows, several times as fast */
  int (*is_finite)(const uint8_t *codes, int64_t count); /* NULL: all codes are */

  /* Quantizing: integer codes -max_level..max_level, the scale of a row or group from its largest
   * magnitude, a second rounding or NULL, and what is added to a code where it is stored
   * without a sign. max_level 0: the format has no quantizer. */
  int32_t max_level, scale_units, code_bias;
  float (*scale)(float amax);
  void (*requantize)(int8_t *codes, int64_t cols);
  /* Whole matrices: the scalar cell, loops over rows, is the reference for every level. */
  kt_quantize_pack_fn *quantize_pack[KT_LEVELS];

  /* Multiplying. */
  kt_rows_kind rows_kind;
  kt_decode_row_fn *decode_row; /* with KT_ROWS_BF16 */
  kt_group_codes_fn *codes_of;  /* with KT_ROWS_GROUP */
  kt_number_fn *number;
  kt_product_fn *product[KT_LEVELS]; /* without a scalar one there are no kernels */
  /* Beside the product of the same level; NULL: it is called for several strips. */
  kt_stream_fn *stream[KT_LEVELS];
  int32_t least_tokens[3]; /* for that of amx, of each of `groups`; fewer are faster without */
  int32_t block_rows;      /* 0: strips lie whole; else blocks of rows as in int_tiles.h */
  kt_transpose_fn *transpose[KT_LEVELS];
  kt_transposed_fn *transposed; /* with AMX; NULL: by strips */
  int splits;                   /* whether it reads split rows */
  const kt_rounded *rounded;    /* with AMX, or NULL */
  uint32_t scaled_strips; /* the dtypes, as a set, of scales that strips of `transpose` contain */
  int32_t least_avx512;   /* tokens, for a stream of avx512 */
};

extern const kt_weight_format kt_int8_format, kt_int4_format, kt_bf16_format, kt_fp8_format,
    kt_mxfp4_format, kt_gint4_format, kt_gint8_format, kt_nvfp4_format, kt_mxfp8_format;

/* The table row of a layout; NULL if there is no such format, group or scale dtype. */
const kt_weight_format *kt_format_of(const kt_layout *layout);

/* Whether a layout can hold [rows, cols]: KT_OK, KT_ERR_ARGUMENT or KT_ERR_SHAPE. No size
 * computed for what passes overflows. */
kt_status kt_layout_check(const kt_layout *layout, int64_t rows, int64_t cols);

/* The source's own scale of row n, whose largest magnitude is `amax`; 0 where it cannot be kept. */
static inline float kt_kept_scale(const kt_weight_format *format, const kt_matrix *m, int64_t n,
                                  float amax) {
  if (!m->row_scale) return 0;
  const float kept = m->row_scale[n] / (float)format->scale_units;
  const int fits = amax <= ((float)format->max_level + 0.5f) * m->row_scale[n];
  return kept >= 0x1p-126f && fits ? kept : 0;
}

/* Bytes of a row of plain codes. */
static inline size_t kt_plain_row_size(const kt_weight_format *format, int64_t cols) {
  return (size_t)(cols * format->plain_bits / 8 + cols / KT_INNER_COLS * format->inner_scales);
}

#endif
