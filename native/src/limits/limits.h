/* limits.h - loops that do nothing but what a limit counts. */
#ifndef KT_LIMITS_H
#define KT_LIMITS_H

#include "ktconv.h"

enum { KT_UNITS = KT_UNIT_BF16 + 1 };

/* Reads streams x size bytes (size a multiple of 256) in ascending order, `streams` parts in
 * turn; the result depends on all. */
typedef uint64_t kt_read_fn(const uint8_t *memory, size_t size, int32_t streams);
kt_read_fn kt_limit_read_scalar, kt_limit_read_avx2, kt_limit_read_avx512;

/* `rounds` rounds of kt_limit_ops() operations on registers, independent of one another. */
typedef void kt_dot_fn(int64_t rounds);
kt_dot_fn kt_limit_int8_scalar, kt_limit_bf16_scalar;
kt_dot_fn kt_limit_int8_avx2, kt_limit_bf16_avx2;
kt_dot_fn kt_limit_int8_avx512, kt_limit_bf16_avx512, kt_limit_bf16_float_avx512;
kt_dot_fn kt_limit_int8_amx, kt_limit_bf16_amx;

/* Multiply-adds of a round: what all loops have in common. */
enum { KT_ROUND = 1 << 16 };

#endif
