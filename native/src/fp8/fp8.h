/* fp8.h - E4M3 weights (no infinities, NaN only with all bits set).
 *
 *   FP8     a binary32 scale per 128 x 128 block or per row
 *   MXFP8   a power of two (UE8M0) per 32 columns of a row, in a matrix of their own (OCP
 *           Microscaling)
 *
 * A packed line is 32 rows x 2 columns: byte (row r, column c) at
 *   r%16/4 * 16 + r/16 * 8 + r%4 * 2 + c
 * so that within each 16 bytes the low 8 hold four of rows 0..15 and the high 8 four of rows
 * 16..31: interleaved with their other bytes they are two lines of bf16. */
#ifndef KT_FP8_H
#define KT_FP8_H

#include "../gemm/bf16_gemm.h"
#include "../gemm/e4m3.h"

enum { KT_FP8_TILE = 1024, KT_FP8_BLOCK = 128 };

/* Codes of both formats: cells of their rows (format/format.h). */
int kt_fp8_is_finite(const uint8_t *codes, int64_t count);
void kt_fp8_pack_tile(const uint8_t *codes, size_t row_size, uint8_t *tile);
void kt_fp8_unpack_row(const uint8_t *packed, int64_t rows, int64_t cols, int64_t n,
                       uint8_t *codes);

/* The number of (row n, column k) without its scale, bf16 bits. */
uint16_t kt_fp8_number(const kt_weight *w, int64_t n, int64_t k);

KT_BF16_KERNELS(fp8);

/* ---- MXFP8 ------------------------------------------------------------------- */

enum { KT_MXFP8_GROUP = 32 };

/* UE8M0 scales, whose products with all codes bf16 holds: 2^-9 * 2^-117 is the smallest normal
 * number, 448 * 2^119 finite. */
enum { KT_MXFP8_EXACT_FIRST = 10, KT_MXFP8_EXACT_LAST = 246 };

KT_BF16_KERNELS(mxfp8);

#endif
