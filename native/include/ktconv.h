/* ktconv.h - the public C API of ktconv's native library.
 *
 * Every function is a pure computation on memory that the caller owns: nothing
 * here allocates, prints, opens a file, exits or keeps state, except that the
 * first call detects the CPU (kt_isa_active) and that a kt_pool has threads.
 * All functions may be called from any number of threads at once as long as
 * their outputs do not overlap. Results do not depend on the thread's
 * floating-point mode (rounding, flush-to-zero).
 *
 * Sizes are in elements unless a name ends in _size (bytes). float pointers and
 * scratch need the alignment of a float; source data and packed bytes need none,
 * but packing is fastest when packed bytes are 64-byte aligned.
 *
 * Functions return KT_OK or the reason for refusing; kt_strerror() words it.
 * On any error the outputs hold unspecified bytes within their bounds.
 */
#ifndef KTCONV_H
#define KTCONV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cffi reads the text between the two markers. */
/* --- begin cffi --- */

typedef enum kt_status {
  KT_OK = 0,
  KT_ERR_ARGUMENT = 1,        /* null pointer, size below 1, unknown dtype or format */
  KT_ERR_SHAPE = 2,           /* rows or cols not a multiple of what format or dtype need, or more
                                 than memory can hold */
  KT_ERR_STRIDE = 3,          /* neither stride of the matrix is 1 */
  KT_ERR_SCALE = 4,           /* a dtype without the scales it needs, or a grid that is none */
  KT_ERR_SCRATCH = 5,         /* scratch smaller than kt_scratch_size(cols) */
  KT_ERR_NONFINITE = 6,       /* a NaN or Inf in the matrix; see kt_position */
  KT_ERR_ISA_UNKNOWN = 7,     /* KTCONV_ISA has a name that is no level */
  KT_ERR_ISA_MISSING = 8,     /* this machine does not have that level */
  KT_ERR_EXPERT = 9,          /* a token goes to an expert that has no weights here */
  KT_ERR_THREADS = 10,        /* threads cannot be created, or belong to another process */
  KT_ERR_ASSUME_UNKNOWN = 11, /* KTCONV_ASSUME has a name that is no level */
  KT_ERR_UNSUPPORTED = 12     /* the function does not do this layout */
} kt_status;

/* One static sentence for a status; never NULL. */
const char *kt_strerror(int status);

/* ---- CPU ---------------------------------------------------------------- */

/* Levels are bundles of instruction sets. The numbers have no order: kt_isa_at() lists the
 * levels of this architecture, each behind those that it contains. */
typedef enum kt_isa {
  KT_ISA_SCALAR = 0, /* portable C */
  KT_ISA_AVX512 = 1, /* x86-64: AVX-512 F, BW, DQ, VL, saved by the OS; contains avx2 */
  KT_ISA_AMX = 2,    /* x86-64: AMX tile, int8, bf16, granted by the OS, and GFNI; contains avx512
                        with VNNI, BF16 and VBMI */
  KT_ISA_AVX2 = 3,   /* x86-64: AVX2, F16C and FMA, saved by the OS; contains scalar */
  KT_ISA_NEON = 4,   /* aarch64: NEON, which all of them have; contains scalar */
  KT_ISA_COUNT
} kt_isa;

/* The levels of this architecture, lowest first; -1 for an index beyond the last. */
int kt_isa_at(int index);

/* "avx512", as KTCONV_ISA names it; NULL for a number that is no level of this architecture. */
const char *kt_isa_name(int isa);

/* Whether this machine has the level, whatever KTCONV_ISA says. */
int kt_isa_has(int isa);

/* What the CPU and the OS report, each 0 or 1. On other architectures all 0. */
typedef struct kt_cpu {
  int32_t avx2; /* and F16C and FMA, which all but the oldest have beside it */
  int32_t avx512, avx512_vnni, avx512_bf16, avx512_vbmi;
  int32_t amx_tile, amx_int8, amx_bf16;
  int32_t amx_permission; /* the kernel grants tile state to this process */
} kt_cpu;

void kt_cpu_detect(kt_cpu *cpu); /* NULL is fine */

/* The highest level this machine has, whatever KTCONV_ISA says. KTCONV_ASSUME=amx (or another
 * level; read once) claims what the CPU does not report, for runs under an instruction
 * emulator; without one the process ends with SIGILL. */
int kt_isa_available(void);

/* The level in use: KTCONV_ISA if set (read once), else the highest available.
 * Returns a kt_isa, or minus a kt_status when KTCONV_ISA is unusable. */
int kt_isa_active(void);

/* Use `isa` from now on in this process, for tests and benchmarks. Not to be
 * called while other threads compute. KT_ERR_ISA_MISSING if not available. */
kt_status kt_isa_use(int isa);

/* The same for a level, or part of one, by its name. KT_ERR_ISA_UNKNOWN for a name that is none. */
kt_status kt_isa_use_named(const char *name);

/* Parts of levels that this machine has, lowest first; NULL beyond the last. KTCONV_ISA and
 * kt_isa_use_named take their names, too: "avx512-base" is AVX-512 as in Skylake-X, "avx512-vnni"
 * as in Cascade Lake, "avx512-bf16" as in Cooper Lake, "avx512-vbmi" as in Sapphire Rapids,
 * "avx512-zen" what is in use on AMD's cores. */
const char *kt_isa_part(int index);

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
  /* Blocks of ggml, as GGUF files have them: 32, 64 (NVFP4) or 256 columns of a row with their own
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
  KT_I4 = 30,      /* a byte: 2 columns, the even one in the low nibble; -8..7, two's complement */
  KT_F4_E0M3 = 31, /* such a byte; sign, then the magnitude in quarters, 0..1.75 */
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
 *
 * All want rows % 32 == 0 and cols % group == 0. Codes and scales have two forms:
 *
 *   plain   row-major, as checkpoints store them: codes
 *             INT8, INT4    int8 [rows, cols]
 *             BF16          uint16 [rows, cols]
 *             FP8           uint8 [rows, cols]
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
  KT_FORMAT_NVFP4 = 7
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
  KT_RULE_AMAX = 0,  /* from the largest magnitude; INT4 rounds twice, as KTransformers does */
  KT_RULE_SEARCH = 1 /* the one of the smallest squared error that a search finds (docs/formats.md);
                        weights are rounded once, those beyond the levels to the last one */
} kt_rule;

typedef struct kt_choice {
  int32_t rule;            /* kt_rule */
  const float *importance; /* of SEARCH: NULL, or [cols] factors of squared errors, 0 .. 2^32 */
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

/* Chooses the codes of the next `cols` columns of weights.
 *   weights       [rows] at `stride` floats, as earlier columns have left them; not changed
 *   factor        [cols][cols] of U, its upper triangle; the diagonal must be > 0
 *   step          [rows][groups] between two codes: scale times scale_units; under a step that is
 *                 not > 0, codes are 0
 *   group_of_col  [cols] which step is a column's
 *   codes         [rows][cols] out: -max_level..max_level, nearest to weight / step, ties to even
 *   errors        [rows][cols] out: (weight - code * step) / factor[j][j], by which the caller
 *                 changes later columns: weights -= errors * (the rows of U of these columns)
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
 * weights. Under KT_RULE_SEARCH, w of an error, but not of the sums, is cut to the largest level.
 * `squared` [2, source->rows], or NULL: each row's part of squared_error, then of squared_source.
 * A NaN or Inf makes the sums NaN or Inf. Same bits on every level. `scratch`:
 * kt_scratch_size(source->cols) bytes, one per thread. */
kt_status kt_audit_run(const kt_layout *layout, const kt_matrix *source, const kt_choice *choice,
                       int64_t rows, int64_t first, const void *packed, const void *packed_scale,
                       float *error, float *amax, float *rule, double *squared, kt_audit *audit,
                       void *scratch, size_t scratch_size);

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

/* ---- Threads --------------------------------------------------------------- */

/* Threads that wait for work. Creating a pool allocates and starts threads; running a job
 * does neither. The calling thread is thread 0 of every job, so a pool of one has no threads
 * of its own. Calls from several threads at once are done one after the other; different
 * pools know nothing of one another. Waiting threads yield their CPU at once and sleep after
 * half a millisecond, so a machine that is busy with other things, or with more threads than
 * CPUs, is slowed down as little as it slows down the job. */
typedef struct kt_pool kt_pool;

/* cpus: NULL, or [threads] the logical CPU of each thread, -1 for any; one that does not exist
 * or is not for this process counts as -1. The caller itself is moved to cpus[0] only while it
 * works, and only if there are several nodes; on a busy machine it has short time slices
 * meanwhile. nodes: NULL (all 0), or [threads] NUMA nodes
 * counted 0, 1, ... in ascending order, none left out.
 * KT_ERR_ARGUMENT: another order, a CPU beyond 8191, threads not 1..4096. KT_ERR_THREADS: no
 * memory, or the system does not allow so many threads. */
kt_status kt_pool_create(int32_t threads, const int32_t *cpus, const int32_t *nodes,
                         kt_pool **pool);
void kt_pool_destroy(kt_pool *pool);          /* no call may be in progress; NULL is fine */
int32_t kt_pool_threads(const kt_pool *pool); /* of NULL: 0, as are its nodes */
int32_t kt_pool_nodes(const kt_pool *pool);

/* Runs a job that does nothing, `times` times: the cost of a job. KT_ERR_THREADS in a child
 * of the process that created the pool, as for every job. */
kt_status kt_pool_empty(kt_pool *pool, int64_t times);

/* Asks for the whole pages of this memory to be on a node, by the system's number: now if
 * they exist, else once they are touched. Without effect where there is no NUMA. */
kt_status kt_memory_bind(void *memory, size_t size, int32_t os_node);

/* ---- MoE forward --------------------------------------------------------- */

enum { KT_MAX_COLS = 32768 }; /* of a matrix that the kernels multiply with */

/* Whether the kernels multiply with packed matrices of this layout and shape: KT_OK, else as
 * kt_pack; KT_ERR_SHAPE also for more than KT_MAX_COLS columns. */
kt_status kt_product_check(const kt_layout *layout, int64_t rows, int64_t cols);

/* Whether kt_moe_forward has code of its own for this layout at level `isa`; 0: it runs the same
 * as at the next lower level, or there is no such level or no kernel for the layout. */
int kt_moe_has_kernels(const kt_layout *layout, int isa);

/* Experts have a gate matrix where the formula has a g, or a gate. */
typedef enum kt_gate_function {
  KT_SWIGLU = 0,           /* h = g * sigmoid(alpha * g) * (u + beta) */
  KT_GELU = 1,             /* h = g * (1 + erf(g / sqrt(2))) / 2 * u */
  KT_GELU_TANH = 2,        /* h = g * sigmoid(sqrt(8 / pi) * (g + 0.044715 g^3)) * u */
  KT_RELU2 = 3,            /* h = max(u, 0)^2 */
  KT_SWIGLU_CLAMPED = 4,   /* h = min(gate * sigmoid(gate), limit) * u: the gate is not cut */
  KT_SOFTCAP = 5,          /* h = alpha * tanh(g / alpha) * sigmoid(g) * (beta * tanh(u / beta)) */
  KT_RELU = 6,             /* h = max(u, 0) */
  KT_UNGATED_GELU = 7,     /* h = u * (1 + erf(u / sqrt(2))) / 2 */
  KT_UNGATED_GELU_TANH = 8 /* h = u * sigmoid(sqrt(8 / pi) * (u + 0.044715 u^3)) */
} kt_gate_function;

/* 1 if experts of this function have a gate matrix, 0 if not, -1 for a number that is none. */
int kt_function_has_gate(int function);

/* g = min(gate, limit), u = clamp(up, -limit, limit) first, then the function, in binary32. A NaN
 * of gate or up makes h NaN. limit >= 0; INFINITY: none. Functions without alpha and beta in their
 * formula do not look at them. KT_SOFTCAP wants both above 0; INFINITY: g or u itself.
 *   SiLU models                  {KT_SWIGLU, 1, 0, INFINITY}
 *   DeepSeek-V4 and others       {KT_SWIGLU, 1, 0, limit}
 *   gpt-oss, MiniMax-M3          {KT_SWIGLU, 1.702, 1, 7}
 *   Nemotron-3                   {KT_RELU2, 0, 0, INFINITY}
 *   nomic-embed-text-v2-moe      {KT_UNGATED_GELU, 0, 0, INFINITY}
 *   Step-3.7                     {KT_SWIGLU_CLAMPED, 0, 0, limit}
 *   Kimi-K3 (situ)               {KT_SOFTCAP, 4, 25, INFINITY} */
typedef struct kt_activation {
  int32_t function; /* kt_gate_function */
  float alpha, beta, limit;
} kt_activation;

/* One expert of one part. Bias pointers may be NULL. With w = intermediate / parts:
 * gate and up [w, hidden], down [hidden, w], bias of gate and up [w], of down [hidden]
 * (the down bias of part 0 is used, those of other parts must be NULL). Codes need no
 * alignment, scales and biases that of their type. Where the layer's function has no gate, the
 * three pointers of gate are NULL. */
typedef struct kt_expert {
  const void *gate, *up, *down;
  const void *gate_scale, *up_scale, *down_scale;
  const float *gate_bias, *up_bias, *down_bias;
} kt_expert;

typedef struct kt_moe {
  kt_layout layout;
  kt_activation activation;
  int64_t hidden, intermediate, experts, parts;
  const kt_expert *expert; /* [parts][experts] */
} kt_moe;

/* Bytes of scratch of kt_moe_forward for up to `tokens` tokens; it does not grow beyond
 * those of 2048 tokens, and is the same for 0 and 1. 0 if an argument is impossible. */
size_t kt_moe_scratch_size(const kt_moe *moe, int64_t tokens, int64_t top_k, const kt_pool *pool);

/* One call of a layer:
 *   y[t] = add[t] + sum over k of weights[t][k] * expert[ids[t][k]](x[t])
 * x and y may be KT_BF16, KT_F16 or KT_F32, each on its own. x is rounded to bf16 first, ties to
 * even; sums are binary32, and rounded to y's dtype once. Arrays are aligned to their types.
 * y may be x or add where the dtypes are the same, else it overlaps nothing that is read. What is
 * read must not change before the call returns; ids least of all, which are read several times. */
typedef struct kt_moe_call {
  int64_t tokens, top_k; /* any number of tokens; of none, no array is looked at; top_k < 2^20 */
  const void *x;         /* [tokens, hidden] */
  const void *ids;       /* [tokens, top_k] */
  const float *weights;  /* [tokens, top_k] */
  const uint8_t *skip;   /* NULL, or [experts]: those that are not 0 count as not chosen; read once,
                            at the start of the call */
  const float *add;      /* NULL: zeros; else [tokens, hidden] */
  void *y;               /* [tokens, hidden] */
  int32_t id_size;       /* bytes of an id: 4 (int32) or 8 (int64) */
  int32_t x_dtype, y_dtype;
} kt_moe_call;

/* Ids that are no expert's, below 0 or from `experts` on, are skipped: such an expert lives
 * elsewhere. An expert that a token names twice counts twice. Experts without tokens cost nothing.
 * Sums run over experts in ascending order, then over parts, of which the first begins with `add`;
 * results have the same bits for any number of threads, any placement, and whatever other tokens
 * are in the batch (for AMX levels of float formats: up to where the kernel switches from one loop
 * to another). Results of INT8, INT4, GINT4 and GINT8 are the same on every level.
 * scratch: 64-byte aligned, one for each call in progress. Calls from several threads may use one
 * pool (they are done one after the other) and one layer.
 * KT_ERR_EXPERT: a token goes to an expert whose pointers are NULL, and which is not to be skipped.
 * KT_ERR_ARGUMENT: also a pointer that is not aligned to its type, a number that kt_activation does
 * not allow, a down bias of another part than 0, a gate where the function has none. */
kt_status kt_moe_forward(const kt_moe *moe, kt_pool *pool, const kt_moe_call *call, void *scratch,
                         size_t scratch_size);

/* The first of the pool's nodes, counted from 0, whose threads compute a part of a layer cut into
 * `parts`: its weights should lie there. -1 if there is no such part. */
int32_t kt_moe_part_node(int64_t parts, int64_t part, const kt_pool *pool);

/* Reads one byte of each page of the weights, by the threads that will use them: pages of
 * a mapped file that are not in memory yet come to the right NUMA node. */
kt_status kt_moe_touch(const kt_moe *moe, kt_pool *pool);

/* ---- Routers --------------------------------------------------------------- *
 *
 * What a router does with its logits: which experts each token goes to, and with what weights. */

enum { KT_MAX_ROUTED = 4096 }; /* logits of a token */

/* The score s of a logit z. */
typedef enum kt_scoring {
  KT_SOFTMAX = 0,      /* exp(z - m) / sum of exp(z - m) over the experts; m is the largest z */
  KT_SIGMOID = 1,      /* 1 / (1 + exp(-z)) */
  KT_SQRT_SOFTPLUS = 2 /* sqrt(log(1 + exp(z))) */
} kt_scoring;

/* Experts are chosen by c = s + correction, or z + correction with `by_logits`. With `groups` > 1,
 * groups of experts / groups neighbours, a group's mark is the sum of its group_score (1 or 2) best
 * c (of a group of one: its c). Experts outside the `keep` best groups cannot be chosen, or compete
 * with c = `masked` where that is not -INFINITY. The weight of a chosen expert is its s, without
 * the correction; with `by_logits`, softmax is over the chosen experts alone. Then, in this order:
 *   renormalise    s / max(norm + epsilon, least_sum), or 0 where that divisor is 0
 *   factor         times factor
 *   expert_factor  times the chosen expert's
 * norm is the p-norm of the chosen s and of the scores of the sinks: the last `sinks` logits of a
 * token, which are no experts and count nowhere else. Softmax has none; with KT_SIGMOID, scores too
 * small for binary32 still have their shares.
 *
 * `jitter` >= 0 is SparseMixer-v2 (arXiv 2409.12136): the best expert, then the best of the others,
 * and so on. A weight is the expert's share of the softmax over it and those worse ones that have
 * (best - z) / max(|z|, best) <= 2 * jitter. It takes KT_SOFTMAX, one group, and neither
 * correction, sinks, by_logits nor renormalise. */
typedef struct kt_router {
  int64_t experts, sinks, top_k; /* together at most KT_MAX_ROUTED logits */
  int32_t scoring;               /* kt_scoring */
  int32_t by_logits;
  const float *correction; /* NULL: zeros; else [experts] */
  int64_t groups, keep;    /* 1, 1: all experts */
  int32_t group_score;
  int32_t renormalise;
  float masked;
  float jitter; /* below 0: none */
  float p_norm; /* above 0; 1: sum, 2: Euclidean, INFINITY: largest; others by pow() */
  float epsilon, least_sum, factor;
  const float *expert_factor; /* NULL: ones; else [experts] */
} kt_router;

/* Experts of each token and their weights.
 *   logits   float [tokens, experts + sinks]
 *   given    NULL, or int64 [tokens, top_k] experts that are not to be chosen, only weighed
 *   ids      int64 [tokens, top_k] out: best first and all different, or as given; may be `given`
 *   weights  float [tokens, top_k] out
 *   pool     NULL: the calling thread
 * Of equal c, and of equal groups, the lowest number is chosen. NaN counts as -INFINITY there, and
 * all weights of a token with a NaN logit are NaN, as are those whose arithmetic gives NaN, such as
 * softmax of logits of which one is INFINITY or all are -INFINITY. All operations are binary32 (the
 * norm: binary64) and spelled out: the same bits on every level and for any number of threads,
 * except where p_norm needs pow(). tokens: any number. KT_ERR_ARGUMENT: sizes that do not fit each
 * other (groups that do not divide the experts, top_k above what the kept groups have), a number
 * that is NaN or outside its range, sinks of a softmax, and what jitter does not take, `given`
 * among it. KT_ERR_EXPERT: an id in `given` that is not one of 0 .. experts - 1. */
kt_status kt_choose_experts(const kt_router *router, kt_pool *pool, int64_t tokens,
                            const float *logits, const int64_t *given, int64_t *ids,
                            float *weights);

/* ---- Fine-tuning ------------------------------------------------------------ *
 *
 * LoRA on the experts: each matrix W counts as W + scale * B A. Formulas of the backward:
 * docs/fine-tuning.md. */

enum { KT_MAX_RANK = 1024 };

/* Six matrices per expert; both of a pair may be NULL: that matrix has none. Elements are dtype,
 * KT_BF16 or KT_F32, the latter rounded to bf16 where they are multiplied. */
typedef struct kt_lora {
  int64_t rank;              /* 1 .. KT_MAX_RANK */
  const void *gate_a, *up_a; /* [experts, rank, hidden] */
  const void *gate_b, *up_b; /* [experts, intermediate, rank] */
  const void *down_a;        /* [experts, rank, intermediate] */
  const void *down_b;        /* [experts, hidden, rank] */
  uint64_t seed;             /* of dropout */
  float scale;               /* alpha / rank; finite, also divided by 1 - dropout */
  float dropout;             /* 0 <= dropout < 1: the chance of each element that A reads to be 0,
                                all others are divided by 1 - dropout */
  int32_t dtype;
} kt_lora;

/* Bytes that a forward saves for the backward, and of scratch of either for up to `tokens` tokens.
 * 0 if an argument is impossible. lora may be NULL. */
size_t kt_train_saved_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k);
size_t kt_train_scratch_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k,
                             const kt_pool *pool);

/* kt_moe_forward with LoRA (NULL: the same bits as kt_moe_forward). saved: NULL, or
 * kt_train_saved_size() bytes, 64-byte aligned, for one backward or several: gate and up before
 * their function, in bf16, A x and A h, and where products read int8, the codes of h. call->add
 * must be NULL. LoRA reads x and the middle in bf16; A x is rounded to bf16, products are summed in
 * binary32. */
kt_status kt_train_forward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool,
                           const kt_moe_call *call, void *saved, void *scratch,
                           size_t scratch_size);

/* Gradients of a forward. Each pointer but dy may be NULL: not wanted. What is wanted is
 * overwritten, with zeros for experts without tokens and for skipped ids; sums are binary32, in an
 * order that does not depend on threads. */
typedef struct kt_moe_gradients {
  const void *dy;                       /* [tokens, hidden]; rounded to bf16 first */
  void *dx;                             /* [tokens, hidden], rounded once */
  float *dweights;                      /* [tokens, top_k] */
  float *gate_a, *gate_b, *up_a, *up_b; /* of the LoRA matrices, in their shapes */
  float *down_a, *down_b;
  float *gate, *up, *down;    /* of the weights: [experts, intermediate, hidden], the same,
                                 [experts, hidden, intermediate]; KT_FORMAT_BF16 only */
  int32_t dy_dtype, dx_dtype; /* KT_BF16, KT_F16 or KT_F32 */
} kt_moe_gradients;

/* moe, lora (its matrices unchanged) and call are those of the forward that has filled `saved`;
 * call->y is not looked at. The gradient is that of the weights that the forward has multiplied
 * with, and rounding counts as the identity. KT_ERR_ARGUMENT also where a gradient of LoRA is
 * wanted whose matrices are not there. */
kt_status kt_train_backward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool,
                            const kt_moe_call *call, const void *saved,
                            const kt_moe_gradients *gradients, void *scratch, size_t scratch_size);

/* ---- Limits of the machine ------------------------------------------------- *
 *
 * Loops to be timed by the caller; all threads of the pool work, at the level in use. */

typedef enum kt_unit {
  KT_UNIT_INT8 = 0, /* 8-bit products, 32-bit sums */
  KT_UNIT_BF16 = 1  /* bf16 products, binary32 sums */
} kt_unit;

/* Reads `size` bytes (a multiple of 1 MiB) once, each thread a part of its own, in 1 to 16
 * ascending streams: which number is fastest depends on the machine. */
kt_status kt_limit_read(kt_pool *pool, const void *memory, size_t size, int32_t streams);

/* Each thread does `rounds` times kt_limit_ops() operations (a multiply-add counts 2) on
 * registers, the fastest that the level has for that unit; scalar: plain C from L1. */
kt_status kt_limit_dot(kt_pool *pool, int unit, int64_t rounds);
int64_t kt_limit_ops(void);

/* --- end cffi --- */

#ifdef __cplusplus
}
#endif
#endif
