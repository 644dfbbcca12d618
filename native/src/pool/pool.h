/* pool.h - threads that wait for jobs, and what a job's threads share.
 *
 * A job is one function that all threads run, the caller among them (thread 0), and that may
 * use barriers and shares. turn.c says how they wait. */
#ifndef KT_POOL_H
#define KT_POOL_H

#include "ktconv.h"
#include "turn.h"

#include <stdatomic.h>

enum { KT_CACHE_LINE = 64 };

typedef void kt_job(void *context, int32_t thread);

/* Runs job(context, t) in every thread t of the pool; returns when all have returned. Calls
 * from several threads wait for one another, so a job must not run a job of the same pool.
 * KT_ERR_THREADS in a child of the process that made the pool: its threads are not there. */
kt_status kt_pool_run(kt_pool *pool, kt_job *job, void *context);

/* Node of a thread, 0 .. kt_pool_nodes - 1; its position among the threads of that node; how
 * many threads a node has. */
int32_t kt_pool_node_of(const kt_pool *pool, int32_t thread);
int32_t kt_pool_rank(const kt_pool *pool, int32_t thread);
int32_t kt_pool_node_threads(const kt_pool *pool, int32_t node);
/* The first thread of a node; for kt_pool_nodes, the number of threads. */
int32_t kt_pool_first_thread(const kt_pool *pool, int32_t node);

/* Counts threads that have come: in groups of neighbours, and the last of each group among the
 * groups. One counter for all would move from core to core once for each thread, 40 to 100 ns each
 * time; here that is as often as a group has threads, plus as often as there are groups: 8 + 16
 * times of 128 threads. */
enum { KT_MAX_GROUPS = 16, KT_GROUP_THREADS = 8 };

typedef struct kt_count {
  _Alignas(KT_CACHE_LINE) atomic_int come;
  int32_t all;
} kt_count;

typedef struct kt_gathering {
  kt_count groups, group[KT_MAX_GROUPS];
  int32_t size; /* threads of a group, the last one's but for what is missing */
} kt_gathering;

void kt_gathering_init(kt_gathering *gathering, int32_t count);
/* 1 to the last of the threads 0 .. count - 1 to come; the next may come again from then on. */
int kt_gathering_come(kt_gathering *gathering, int64_t thread);

/* All `count` threads wait until the last has come. Reusable at once. Its memory must stay
 * until every thread has left, as it does if it outlives the job. */
typedef struct kt_barrier {
  kt_gathering gathering;
  _Alignas(KT_CACHE_LINE) kt_turn turn;
} kt_barrier;

void kt_barrier_init(kt_barrier *barrier, int32_t count);
/* `thread`: 0 .. count - 1, another for each. */
void kt_barrier_wait(kt_barrier *barrier, int64_t thread);

/* Items next .. end - 1, handed out in runs of neighbours: long runs at first (so that each
 * thread streams through memory), down to `grain` at the end (so that all finish together). */
typedef struct kt_share {
  _Alignas(KT_CACHE_LINE) atomic_llong next;
  int64_t end, grain;
  int32_t threads;
} kt_share;

/* Items 0 .. items - 1. */
void kt_share_init(kt_share *share, int64_t items, int64_t grain, int32_t threads);
/* Items first .. end - 1. */
void kt_share_init_range(kt_share *share, int64_t first, int64_t end, int64_t grain,
                         int32_t threads);

/* The next run; 0 when nothing is left. Any number of threads at once. */
int kt_share_take(kt_share *share, int64_t *first, int64_t *count);

#endif
