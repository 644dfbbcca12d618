/* What this machine can do at best: reading memory, multiplying and adding. */
#include "limits.h"

#include "../cpu.h"
#include "../pool/pool.h"

#include <stdatomic.h>

static kt_read_fn *const reads[KT_LEVELS] = {
    [KT_ISA_SCALAR] = kt_limit_read_scalar,
#if KT_X86
    [KT_ISA_AVX2] = kt_limit_read_avx2,
    [KT_ISA_AVX512] = kt_limit_read_avx512,
#endif
};

static kt_dot_fn *const dots[KT_UNITS][KT_LEVELS] = {
    [KT_UNIT_INT8][KT_ISA_SCALAR] = kt_limit_int8_scalar,
    [KT_UNIT_BF16][KT_ISA_SCALAR] = kt_limit_bf16_scalar,
#if KT_X86
    [KT_UNIT_INT8][KT_ISA_AVX2] = kt_limit_int8_avx2,
    [KT_UNIT_BF16][KT_ISA_AVX2] = kt_limit_bf16_avx2,
    [KT_UNIT_INT8][KT_ISA_AVX512_VNNI] = kt_limit_int8_avx512,
    [KT_UNIT_BF16][KT_ISA_AVX512_ZEN] = kt_limit_bf16_avx512,
    [KT_UNIT_BF16][KT_ISA_AVX512] = kt_limit_bf16_float_avx512,
    [KT_UNIT_INT8][KT_ISA_AMX] = kt_limit_int8_amx,
    [KT_UNIT_BF16][KT_ISA_AMX] = kt_limit_bf16_amx,
#endif
};

enum { PIECE = 1 << 20, MOST_STREAMS = 16 };

typedef struct reading {
  const uint8_t *memory;
  size_t size;
  int32_t streams;
  kt_read_fn *read;
  atomic_ullong sum; /* so that no compiler leaves the reading out */
} reading;

static void read_job(void *context, int32_t thread, int32_t threads) {
  reading *r = context;
  const size_t pieces = r->size / PIECE;
  const size_t first = pieces * (size_t)thread / (size_t)threads;
  const size_t end = pieces * (size_t)(thread + 1) / (size_t)threads;
  const size_t stream = (end - first) / (size_t)r->streams * PIECE;
  const uint8_t *memory = r->memory + first * PIECE;
  const size_t rest = (end - first) * PIECE - stream * (size_t)r->streams;
  uint64_t sum = r->read(memory, stream, r->streams);
  sum += r->read(memory + stream * (size_t)r->streams, rest, 1);
  atomic_fetch_add(&r->sum, sum);
}

typedef struct job {
  void (*run)(void *context, int32_t thread, int32_t threads);
  void *context;
  int32_t threads;
} job;

static void run_job(void *context, int32_t thread) {
  const job *j = context;
  j->run(j->context, thread, j->threads);
}

kt_status kt_limit_read(kt_pool *pool, const void *memory, size_t size, int32_t streams) {
  if (!pool || !memory || size < PIECE || size % PIECE) return KT_ERR_ARGUMENT;
  if (streams < 1 || streams > MOST_STREAMS) return KT_ERR_ARGUMENT;
  reading r = {.memory = memory, .size = size, .streams = streams, .read = KT_CELL(reads)};
  job j = {read_job, &r, kt_pool_threads(pool)};
  return kt_pool_run(pool, run_job, &j);
}

typedef struct dotting {
  kt_dot_fn *dot;
  int64_t rounds;
} dotting;

static void dot_job(void *context, int32_t thread, int32_t threads) {
  const dotting *d = context;
  (void)thread, (void)threads;
  d->dot(d->rounds);
}

kt_status kt_limit_dot(kt_pool *pool, int unit, int64_t rounds) {
  if (!pool || unit < 0 || unit >= KT_UNITS || rounds < 0) return KT_ERR_ARGUMENT;
  dotting d = {KT_CELL(dots[unit]), rounds};
  job j = {dot_job, &d, kt_pool_threads(pool)};
  return kt_pool_run(pool, run_job, &j);
}

int64_t kt_limit_ops(void) { return 2 * (int64_t)KT_ROUND; }
