/* ktconv_convert.h - from stored weights to codes and scales, and back: source matrices, weight
 * formats, encodings of checkpoints, error compensation, audit. Part of ktconv.h. */
#ifndef KTCONV_CONVERT_H
#define KTCONV_CONVERT_H

#include "ktconv_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cffi reads the text between the two markers. */
/* --- begin cffi --- */

/* ---- Source matrices ---------------------------------------------------- */

/* What is in one stored unit. */
typedef enum kt_dtype {
  KT_BF16 = 0,
  KT_F16 = 1,
  KT_F32 = 2,
  KT_F8_E4M3 = 3,
  KT_F4_E2M1 = 4, /* a byte: 2 columns, the even one in the low nibble; sign, then the magnitudes
                     0, 0.5, 1, 1.5, 2, 3, 4, 6 */
  KT_U4 = 5,      /* a little-endian 32-bit word: 8 columns, 0..15, the first in the lowest bits */
  KT_U4_AWQ = 6,  /* such a word: 8 rows, from the lowest bits on 0, 2, 4, 6, 1, 3, 5, 7 */
  KT_I8 = 7,      /* a signed byte */
  KT_U2 = 8,      /* as U4, of 2 bits: 16 columns */
  KT_U3 = 9,      /* three such words as one stream of bits: 32 columns of 3 bits, 0..7 */
  KT_U5 = 10,     /* five words: 32 columns */
  KT_U6 = 11,     /* three words: 16 columns */
  KT_U7 = 12,     /* seven words: 32 columns */
  KT_U8 = 13,     /* a word: 4 columns, 0..255 */
  /* Blocks of ggml, as GGUF files have them: 32, 64, 128 or 256 columns of a row with their own
     scales; docs/encodings.md has the bits. A value is a code times the scale of its part of the
     block, less an offset where there is one, each operation rounded to binary32; which NaN comes
     of NaN is not defined. */
  KT_Q4_0 = 14,
  KT_Q4_1 = 15,
  KT_Q5_0 = 16,
  KT_Q5_1 = 17,
  KT_Q8_0 = 18,
  KT_Q2_K = 19,
  KT_Q3_K = 20,
  KT_Q4_K = 21,
  KT_Q5_K = 22,
  KT_Q6_K = 23,
  KT_IQ4_NL = 24,
  KT_IQ4_XS = 25,
  KT_MXFP4 = 26,
  KT_NVFP4 = 27,
  KT_TQ1_0 = 28,
  KT_TQ2_0 = 29,
  KT_Q1_0 = 30,
  KT_Q2_0 = 31,
  KT_I4 = 32,      /* a byte: 2 columns, the even one in the low nibble; -8..7, two's complement */
  KT_F4_E0M3 = 33, /* such a byte; sign, then the magnitude in quarters, 0..1.75 */
  KT_F6_E2M3 = 34, /* three bytes: 4 columns, the first in the lowest bits; sign, 2 bits of
                      exponent (bias 1), 3 of mantissa; no infinities or NaN */
  KT_DTYPE_COUNT
} kt_dtype;

/* Elements are stored in units of so many bytes, each with so many neighbouring rows and columns;
 * bits per element are 8 * bytes / (rows * cols). */
typedef struct kt_stored_unit {
  int32_t bytes, rows, cols;
} kt_stored_unit;

/* KT_ERR_ARGUMENT for a number that is no dtype. */
kt_status kt_dtype_unit(int dtype, kt_stored_unit *unit);

/* A [rows, cols] view of source weights, rows = output features (PyTorch [out, in]).
 * The unit with element (n, k) is n / unit.rows * row_stride + (first_col + k) / unit.cols *
 * col_stride units after data; one of the strides is 1, and rows and cols are whole units. Blocks
 * of ggml may be cut: first_col is where in its first block a row begins, and both it and cols are
 * multiples of 32. The value of an element is the exact binary32 widening of the stored number
 * (blocks of ggml: see kt_dtype). If there are scales, which F8_E4M3 to U8 need, it is
 *   fl32((value - zero_point[at]) * block_scale[at])
 *   at = (row_origin+n)/block_rows * scale_stride + group of column k
 *   group of column k: group_of_col ? group_of_col[k] : (col_origin+k)/block_cols
 * With round_to_bf16 that value is then rounded to bfloat16, ties to even. Blocks express scales
 * of any granularity: block_rows 1 and block_cols 32 are groups, block_cols = cols channels, and
 * block_rows = rows as well one scale for the tensor. Two levels of scales are one grid of their
 * products or quotients, which the caller makes.
 * Last, row n is multiplied by row_factor[n] and column k by col_factor[k], each product rounded to
 * binary32: what moves between the matrices of an expert without changing what it computes.
 * Integers with one scale per row can be kept: where a row of `row_scale` is the scale of integers
 * that the format's levels include, INT8 and INT4 take both unchanged. A row is quantized anew if
 * a magnitude is beyond max_level + 1/2 of its row_scale, or the stored scale would be denormal.
 * KT_ERR_SCALE: also a row_scale beside factors. */
typedef struct kt_matrix {
  const void *data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;
  int32_t dtype; /* kt_dtype */
  int32_t round_to_bf16;
  const float *block_scale; /* NULL: none */
  int64_t scale_stride;     /* floats from one row of the grid to the next */
  int64_t block_rows, block_cols;
  int64_t row_origin, col_origin;
  const float *zero_point;     /* NULL: zeros; else a grid as block_scale's */
  const int32_t *group_of_col; /* NULL, else [cols] columns of the grid, not checked */
  const float *row_scale;      /* NULL, else [rows] scales to keep */
  int64_t first_col;           /* columns of the first unit before the matrix: blocks of ggml */
  const float *row_factor;     /* NULL: ones; else [rows], finite */
  const float *col_factor;     /* NULL: ones; else [cols], finite */
} kt_matrix;

/* Where KT_ERR_NONFINITE was found: the first such element in row order. */
typedef struct kt_position {
  int64_t row, col;
} kt_position;

/* Bytes of scratch that the functions below need for matrices of `cols`. */
size_t kt_scratch_size(int64_t cols);

/* The matrix as binary32, row-major [rows, cols], NaN and Inf included. */
kt_status kt_decode(const kt_matrix *matrix, float *out);

/* ---- Files as memory ------------------------------------------------------ *
 *
 * Bytes of a file without a copy. Where a page of it cannot be read, since the file became shorter
 * or its disk fails, the system ends a process by SIGBUS. In bytes that kt_file_map has given, of
 * any thread, such a page and all behind it read as zeros instead, and kt_file_lost says so: what
 * was made of these bytes does not count then. (In the page with a file's new end, what is behind
 * that becomes zeros, and no system tells: ask whether the file has changed.) For that, the first
 * kt_file_map takes over the process's handler of SIGBUS, and later ones take it again from who
 * took it since; any other SIGBUS goes to the handler that was there before. */

enum { KT_MAPPED_MOST = 1024 }; /* at once in a process */

typedef struct kt_mapped {
  const uint8_t *data; /* the byte at `offset` of the file */
  void *pages;         /* what is mapped for it, for the functions below */
  size_t size;
  int32_t slot;
} kt_mapped;

/* Maps size > 0 bytes from offset >= 0 on of a file that is open for reading; all are in memory
 * when it returns. KT_ERR_UNSUPPORTED: this file cannot be mapped, does not have these bytes, or
 * KT_MAPPED_MOST are mapped already; reading it by other means tells. */
kt_status kt_file_map(int32_t descriptor, int64_t offset, size_t size, kt_mapped *mapped);

/* 1 if some of the bytes could not be read when they were asked for, else 0. */
int kt_file_lost(const kt_mapped *mapped);

/* Nobody may read the bytes any more. */
void kt_file_unmap(const kt_mapped *mapped);

/* ---- Weight formats ------------------------------------------------------ *
 *
 * A matrix of weights [rows, cols] (PyTorch [out, in]) is stored as codes and scales. A format
 * says what a code means and where its bits lie; a layout is a format with the columns that
 * share a scale ("group"; 0: a whole row) and the dtype of scales:
 *
 *                      bits  group          scale dtype   cols %  value of a code
 *   KT_FORMAT_INT8     8     0              F32           64      code * scale, -127..127
 *   KT_FORMAT_INT4     4     0              F32           128     code * 16 * scale, -7..7
 *   KT_FORMAT_BF16     16    0              NONE          32      bf16
 *   KT_FORMAT_FP8      8     0 or 128       F32           64      E4M3 * scale; group 128: of a
 *                                                                 block of 128 x 128
 *   KT_FORMAT_MXFP4    4     32             UE8M0, BF16   32      E2M1 * scale
 *   KT_FORMAT_GINT4    4     32, 64 or 128  F32, BF16     32      code * scale, -8..7
 *   KT_FORMAT_GINT8    8     32, 64 or 128  F32, BF16     32      code * scale, -128..127
 *   KT_FORMAT_NVFP4    4.5   0              F32           32      E2M1 * E4M3 * scale; the E4M3 of
 *                                                                 16 columns, among the codes
 *   KT_FORMAT_MXFP8    8     32             UE8M0         32      E4M3 * scale
 *
 * All want rows % 32 == 0 and cols % group == 0. Codes and scales have two forms:
 *
 *   plain   row-major, as checkpoints store them: codes
 *             INT8, INT4    int8 [rows, cols]
 *             BF16          uint16 [rows, cols]
 *             FP8, MXFP8    uint8 [rows, cols]
 *             MXFP4, GINT4  uint8 [rows, cols / 2], even columns in the low nibbles;
 *                           a nibble of GINT4 is code + 8
 *             GINT8         uint8 [rows, cols], code + 128
 *             NVFP4         uint8 [rows, cols / 32, 18]: 16 bytes as MXFP4's, then the E4M3 scales
 *                           of columns 0..15 and 16..31
 *           scales [rows], [rows, cols / group], or [ceil(rows / 128), cols / 128] of FP8 with
 *           group 128
 *   packed  kt_packed_size() and kt_scale_size() bytes, in the order in which kernels read them;
 *           docs/formats.md draws both. The same on every ISA.
 *
 * quantize       chooses numbers: a matrix to plain codes and scales
 * pack, unpack   place bytes: plain <-> packed, whoever chose the numbers
 * quantize_pack  both in one pass over the source; equal to the two in sequence
 *
 * docs/formats.md specifies the rounding of quantize. `choice`: how numbers are chosen; NULL: by
 * KT_RULE_AMAX. `bad` may be NULL. `scratch` has
 * kt_scratch_size(cols) bytes, one per thread. KT_ERR_ARGUMENT: also a layout that is not in the
 * table. KT_ERR_UNSUPPORTED: one that this function does not do. */

typedef enum kt_format {
  KT_FORMAT_INT8 = 0,
  KT_FORMAT_INT4 = 1,
  KT_FORMAT_BF16 = 2,
  KT_FORMAT_FP8 = 3,
  KT_FORMAT_MXFP4 = 4,
  KT_FORMAT_GINT4 = 5,
  KT_FORMAT_GINT8 = 6,
  KT_FORMAT_NVFP4 = 7,
  KT_FORMAT_MXFP8 = 8
} kt_format;

typedef enum kt_scale_dtype {
  KT_SCALE_NONE = 0,
  KT_SCALE_F32 = 1,
  KT_SCALE_BF16 = 2,
  KT_SCALE_UE8M0 = 3 /* 2^(byte - 127) */
} kt_scale_dtype;

typedef struct kt_layout {
  int32_t format;      /* kt_format */
  int32_t group;       /* columns that share a scale, 0: all of a row */
  int32_t scale_dtype; /* kt_scale_dtype */
} kt_layout;

/* What follows from a layout. */
typedef struct kt_layout_traits {
  int32_t bits, plain_bits;           /* of a packed code and of a plain one */
  int32_t inner_scales;               /* bytes of scales among the codes of 32 columns of a row */
  int32_t code_bias;                  /* a plain code is stored as code + this */
  int32_t row_multiple, col_multiple; /* that rows and cols must be multiples of */
  int32_t scale_size;                 /* bytes of one scale, 0 without scales */
  int32_t scale_rows;                 /* rows that share a plain scale */
  int32_t max_level;                  /* quantize chooses codes -max_level..max_level; 0: it does
                                         not do this layout */
  int32_t scale_units;                /* a step between two codes is so many scales */
} kt_layout_traits;

kt_status kt_layout_describe(const kt_layout *layout, kt_layout_traits *traits);

/* How the scale of a row, or of a group of its columns, follows from its weights. */
typedef enum kt_rule {
  KT_RULE_AMAX = 0,     /* from the largest magnitude; INT4 rounds twice, as KTransformers does */
  KT_RULE_SEARCH_1 = 1, /* the one of the smallest squared error that a search in binary32 finds
                           (docs/formats.md, 3.6); weights are rounded once, those beyond the levels
                           to the last one */
  KT_RULE_SEARCH = 2 /* the same of groups and with importance; of whole rows without, a search in
                        fixed point (3.8), which takes a third of the time */
} kt_rule;

typedef struct kt_choice {
  int32_t rule;            /* kt_rule */
  const float *importance; /* of a search: NULL, or [cols] factors of squared errors, 0 .. 2^32 */
} kt_choice;

/* Bytes of packed codes and packed scales; 0 if the layout does not allow that shape (scales are
 * also 0 where the layout has none). */
size_t kt_packed_size(const kt_layout *layout, int64_t rows, int64_t cols);
size_t kt_scale_size(const kt_layout *layout, int64_t rows, int64_t cols);

/* INT8, INT4, GINT4 and GINT8. codes and scale are plain. */
kt_status kt_quantize(const kt_layout *layout, const kt_matrix *matrix, const kt_choice *choice,
                      void *codes, void *scale, void *scratch, size_t scratch_size,
                      kt_position *bad);

/* scale and packed_scale may both be NULL: only codes are placed. KT_ERR_NONFINITE for a scale, or
 * an FP8 code, that is NaN or Inf (also one among codes). That codes of INT8 and INT4 are in their
 * ranges is not checked. */
kt_status kt_pack(const kt_layout *layout, int64_t rows, int64_t cols, const void *codes,
                  const void *scale, void *packed, void *packed_scale);

/* The inverse; accepts any bytes. scale and packed_scale may both be NULL. */
kt_status kt_unpack(const kt_layout *layout, int64_t rows, int64_t cols, const void *packed,
                    const void *packed_scale, void *codes, void *scale);

/* INT8, INT4, GINT4 and GINT8. packed and packed_scale are packed. */
kt_status kt_quantize_pack(const kt_layout *layout, const kt_matrix *matrix,
                           const kt_choice *choice, void *packed, void *packed_scale, void *scratch,
                           size_t scratch_size, kt_position *bad);

/* ---- Encodings of checkpoints ------------------------------------------------ *
 *
 * Codes and scales as other engines load them, chosen by the arithmetic of the libraries that
 * define these formats: a matrix [rows, cols] of weights becomes
 *
 *                     group     codes, row-major                  scales [rows, groups]
 *   KT_ENCODE_INT4    any or 0  code + 8, -8..7, in int32 words   bf16, or f16 with `half`
 *   KT_ENCODE_INT8    any or 0  code + 128, -128..127, likewise   bf16, or f16 with `half`
 *   KT_ENCODE_FP8     0         E4M3                              f32
 *                     128       E4M3                              f32, of 128 x 128 weights
 *   KT_ENCODE_MXFP4   32        E2M1, the even column in the low  UE8M0
 *   KT_ENCODE_MXFP8   32        E4M3                              UE8M0
 *   KT_ENCODE_NVFP4   16        E2M1, as MXFP4                    E4M3, times 1 / tensor_scale
 *   KT_ENCODE_BF16    0         bf16, infinite from 2^128 (1 - 2^-9)  none: scale_size is 0
 *
 * A group is so many columns, 0 all of a row; it divides the columns, except for FP8. Nibbles and
 * bytes of a word begin at the lowest bits; a row ends with a whole word, of codes that are 0.
 * docs/formats.md, section 10, has the rules. */

typedef enum kt_encode_kind {
  KT_ENCODE_INT4 = 0,
  KT_ENCODE_INT8 = 1,
  KT_ENCODE_FP8 = 2,
  KT_ENCODE_MXFP4 = 3,
  KT_ENCODE_MXFP8 = 4,
  KT_ENCODE_NVFP4 = 5,
  KT_ENCODE_BF16 = 6
} kt_encode_kind;

typedef struct kt_encoding {
  int32_t kind;   /* kt_encode_kind */
  int32_t group;  /* columns that share a scale, 0: all of a row */
  int32_t half;   /* INT4, INT8: 1 if weights and scales are f16, not bf16 */
  int32_t search; /* INT4, INT8: 1 if scales are searched, 0 if they are those of the largest */
} kt_encoding;

typedef struct kt_encoded {
  int64_t row_size;               /* bytes of a row of codes */
  int64_t scale_rows, scale_cols; /* shape of the scales */
  int64_t scale_size;             /* bytes of each */
} kt_encoded;

/* KT_ERR_ARGUMENT: a group that a kind does not have; KT_ERR_SHAPE: one that does not divide. */
kt_status kt_encoded_sizes(const kt_encoding *encoding, int64_t rows, int64_t cols,
                           kt_encoded *sizes);

/* INT4 and INT8 want a matrix of numbers that are bf16 or, with `half`, f16 (round_to_bf16).
 * tensor_scale: of NVFP4, > 0; 448 * 6 / the largest magnitude of the tensor. `scales` is aligned
 * to its elements. bad may be NULL; scratch: kt_scratch_size(cols) bytes, one per thread. Same
 * bits on every level. */
kt_status kt_encode(const kt_encoding *encoding, const kt_matrix *matrix, float tensor_scale,
                    void *codes, void *scales, void *scratch, size_t scratch_size,
                    kt_position *bad);

/* ---- Blocks of ggml ----------------------------------------------------------- *
 *
 * A matrix as Q4_0, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL or MXFP4 (kt_dtype): rows one after the other,
 * each of cols / unit.cols blocks. Scales, minima and codes are those of a search for a small
 * sum(importance[k] (w - v)^2) of each block; codes are the nearest for the stored scales.
 * importance: NULL, all 1, or [cols], 0 to 1e12. KT_ERR_SHAPE: cols are no whole blocks;
 * KT_ERR_SCALE: a weight is too large for scales in binary16; KT_ERR_NONFINITE, bad (which may be
 * NULL) and scratch as in kt_encode. Same bits on every level. */

kt_status kt_encode_blocks(int32_t dtype, const kt_matrix *matrix, const float *importance,
                           void *blocks, void *scratch, size_t scratch_size, kt_position *bad);

/* The largest magnitude of a matrix. bad and scratch as in kt_encode. KT_ERR_NONFINITE. */
kt_status kt_largest(const kt_matrix *matrix, float *largest, void *scratch, size_t scratch_size,
                     kt_position *bad);

/* ---- Error compensation ------------------------------------------------------ *
 *
 * Codes of weights whose inputs are correlated: each column is rounded in turn, and its error is
 * made up for by the columns that are not rounded yet (optimal brain quantization). The matrix
 * H = X^T X of inputs says how: with H^-1 = U^T U, U upper triangular, rounding column j of a row
 * by an error e costs (e / U[j][j])^2, after e / U[j][j] * U[j][k] was taken from each column k >
 * j. */

enum { KT_COMPENSATE_COLS = 128 }; /* at a time */

/* Chooses the codes of the next `cols` columns of weights. Columns lie one behind the other here.
 *   weights       [cols] at `stride` floats, each [rows], as earlier columns have left them; not
 *                 changed
 *   factor        [cols][cols] of U, its upper triangle; the diagonal must be > 0
 *   step          [groups][rows] between two codes: scale times scale_units; under a step that is
 *                 not > 0, codes are 0
 *   group_of_col  [cols] which step is a column's
 *   codes         [cols][rows] out: -max_level..max_level, nearest to weight / step, ties to even
 *   errors        [cols][rows] out: (weight - code * step) / factor[j][j], by which the caller
 *                 changes later columns: weights -= (the rows of U of these columns)^T * errors
 *   loss          [rows] in and out: the squares of errors are added, in the order of columns
 * All operations are binary32, each rounded, none fused; `loss` is binary64. Same bits on every
 * level. KT_ERR_SCALE: a diagonal that is not positive, or a group that there is not. */
kt_status kt_compensate(int32_t max_level, int64_t rows, int64_t cols, const float *weights,
                        int64_t stride, const float *factor, const float *step, int64_t groups,
                        const int32_t *group_of_col, int8_t *codes, float *errors, double *loss);

/* ---- Audit ------------------------------------------------------------------ *
 *
 * A second opinion on packed weights, sharing no code with what packs them: places and values
 * follow from docs/formats.md alone. INT8, INT4, GINT4 and GINT8. */

typedef struct kt_audit {
  double squared_source; /* sums over the rows compared: w^2, */
  double squared_error;  /* (w - v)^2 with v the dequantized weight, */
  double squared_value;  /* v^2; so w * v is (w^2 + v^2 - (w - v)^2) / 2 */
  double max_steps;      /* largest |w - v| in steps of its scale, of scales > 0 */
  int64_t zeros;         /* codes that are 0 */
  int64_t invalid; /* codes outside -127..127 (INT8) or -7..7 (INT4), codes not 0 under scale 0 */
} kt_audit;

/* Compares rows first .. first + source->rows (multiples of 32) of the packed matrix
 * [rows, source->cols] to their source. Of what each scale of those rows is for (a row, or a
 * group of its columns), [source->rows] or [source->rows, cols / group]: error the largest
 * |w - v|, amax the largest |w|, rule the scale that `choice` (NULL: KT_RULE_AMAX) makes of its
 * weights. Under a search, w of an error, but not of the sums, is cut to the largest level.
 * `squared` [2, source->rows], or NULL: each row's part of squared_error, then of squared_source.
 * A NaN or Inf makes the sums NaN or Inf. Same bits on every level. `scratch`:
 * kt_scratch_size(source->cols) bytes, one per thread. */
kt_status kt_audit_run(const kt_layout *layout, const kt_matrix *source, const kt_choice *choice,
                       int64_t rows, int64_t first, const void *packed, const void *packed_scale,
                       float *error, float *amax, float *rule, double *squared, kt_audit *audit,
                       void *scratch, size_t scratch_size);

/* A matrix for kt_quantize_audit: pointers as kt_quantize_pack and kt_audit_run take them, and what
 * is found. `sums`: kt_byte_sum of packed and of packed_scale, of the bytes as they were when they
 * had been compared: what has other sums later is not what was proven. */
typedef struct kt_proven {
  const kt_matrix *matrix;
  const kt_choice *choice; /* NULL: KT_RULE_AMAX */
  void *packed, *packed_scale;
  float *error, *amax, *rule;
  double *squared; /* or NULL */
  kt_audit audit;
  uint64_t sums[2];
} kt_proven;

/* kt_quantize_pack, then kt_audit_run of what that has made, of some rows after the other: caches
 * still have the weights when they are compared. So for `count` matrices, one after the other: a
 * call for each of many small ones would cost more than its work. Results are those of the two
 * calls, but for the last bits of squared_value, which is added up in another order. INT8, INT4,
 * GINT4 and GINT8. `scratch`: for the matrix with the most columns. Errors as of both, at the first
 * matrix that has one, whose index is in `failed` then (or NULL); its results are undefined, and
 * those of later ones not touched. */
kt_status kt_quantize_audit(const kt_layout *layout, kt_proven *matrices, int64_t count,
                            void *scratch, size_t scratch_size, int64_t *failed, kt_position *bad);

/* The sum, modulo 2^64, of `size` bytes taken as words of 64 bits in the order of this machine, the
 * last one filled up with zeros. Bytes that one changed bit or word, or other contents, have made
 * different have another sum; words in another order have the same. */
uint64_t kt_byte_sum(const void *bytes, size_t size);

/* Whether `size` bytes are the same in both places; if so, their kt_byte_sum is in `sum`. */
int kt_same_bytes(const void *bytes, const void *others, size_t size, uint64_t *sum);

/* kt_unpack by the audit's own path: codes int8 [rows, cols], row-major. */
kt_status kt_audit_codes(const kt_layout *layout, const void *packed, int64_t rows, int64_t cols,
                         int8_t *codes);

typedef struct kt_encoded_audit {
  double squared_source, squared_error, squared_value; /* as kt_audit's */
  double max_steps;     /* largest |w - v| in steps, of scales that are normal numbers */
  int64_t zeros;        /* codes that are 0 */
  int64_t other_codes;  /* codes that are not those of the rule, given their scales */
  int64_t other_scales; /* scales that are not those of the rule */
} kt_encoded_audit;

/* Compares codes and scales of kt_encode with their source by code of its own. cols and groups are
 * multiples of 32, but for the groups of NVFP4; so are the rows of a source that is not stored row
 * by row. Of FP8 with blocks, `source` begins with a block of rows. A step of a floating-point code
 * is the distance to the next larger one, of the largest that to the next smaller one. A NaN or Inf
 * makes the sums NaN or Inf, also of a code that binary32 has no finite number for. Same bits on
 * every level. */
kt_status kt_audit_encoded(const kt_encoding *encoding, const kt_matrix *source, float tensor_scale,
                           const void *codes, const void *scales, kt_encoded_audit *audit);

/* kt_encode, then kt_audit_encoded of what that has made, of some rows after the other: caches
 * still have the weights when they are compared. Results are those of the two calls, but for the
 * last bits of sums of squares, which are added up in another order. sums [2]: kt_byte_sum of codes
 * and of scales as they were when they had been compared. Errors as of both; KT_ERR_SHAPE before
 * anything is encoded. */
kt_status kt_encode_audit(const kt_encoding *encoding, const kt_matrix *matrix, float tensor_scale,
                          void *codes, void *scales, void *scratch, size_t scratch_size,
                          kt_encoded_audit *audit, uint64_t *sums, kt_position *bad);

/* Compares blocks of kt_encode_blocks with their source by decoders of its own. other_codes:
 * weights to which another number of their block is nearer; max_steps: of types with even steps,
 * beyond 0.5 where a scale cuts a weight off. other_scales is 0: scales are of a search.
 * KT_ERR_SHAPE: columns that are no whole blocks; rows of a source that is not stored row by row,
 * no multiple of 32. Same bits on every level. */
kt_status kt_audit_blocks(int32_t dtype, const kt_matrix *source, const void *blocks,
                          kt_encoded_audit *audit);

/* --- end cffi --- */

#ifdef __cplusplus
}
#endif
#endif
