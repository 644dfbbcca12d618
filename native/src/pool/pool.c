/* The pool: creation, jobs, placement of threads. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "pool.h"

#include "wait.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_THREADS = 4096, STACK_SIZE = 1 << 20 };

typedef struct member {
  pthread_t thread;
  struct kt_pool *pool;
  int32_t index, cpu, node;
} member;

struct kt_pool {
  int32_t threads, nodes;
  int32_t placed; /* threads have CPUs of their own and there are several nodes */
  pid_t owner;
  member *members; /* [threads]; 0 is the caller and has no thread */
  pthread_mutex_t one_job;
  kt_job *job;
  void *context;
  int32_t stop;
  _Alignas(KT_CACHE_LINE) atomic_uint generation; /* of the job; changes when one starts */
  _Alignas(KT_CACHE_LINE) atomic_int sleepers;
  _Alignas(KT_CACHE_LINE) atomic_uint finished; /* members that are done with this job */
};

/* ---- Barrier ---------------------------------------------------------------- */

void kt_barrier_init(kt_barrier *barrier, int32_t count) {
  atomic_init(&barrier->arrived, 0);
  atomic_init(&barrier->generation, 0);
  barrier->count = count;
}

void kt_barrier_wait(kt_barrier *barrier) {
  const unsigned now = atomic_load_explicit(&barrier->generation, memory_order_acquire);
  if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) + 1 < barrier->count) {
    kt_wait_awake(&barrier->generation, now);
    return;
  }
  atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
  atomic_store_explicit(&barrier->generation, now + 1, memory_order_release);
}

/* ---- Workers ------------------------------------------------------------------ */

static void move_to_cpus(const kt_pool *pool, int32_t node, int32_t cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int32_t t = 0; t < pool->threads; t++)
    if (cpu >= 0 ? t == cpu : pool->members[t].node == node)
      if (pool->members[t].cpu >= 0 && pool->members[t].cpu < CPU_SETSIZE)
        CPU_SET((size_t)pool->members[t].cpu, &set);
  if (CPU_COUNT(&set)) pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)pool, (void)node, (void)cpu;
#endif
}

static void *work(void *argument) {
  const member *self = argument;
  kt_pool *pool = self->pool;
  unsigned generation = 0;
  if (self->cpu >= 0) move_to_cpus(pool, self->node, self->index);
  for (;;) {
    kt_wait_asleep(&pool->generation, generation, &pool->sleepers);
    generation = atomic_load_explicit(&pool->generation, memory_order_acquire);
    if (pool->stop) return NULL;
    pool->job(pool->context, self->index);
    atomic_fetch_add_explicit(&pool->finished, 1, memory_order_release);
  }
}

/* Signals are for the threads of the program, except those that a fault of ours raises. */
static void block_signals(sigset_t *before) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGPROF};
  sigset_t set;
  sigfillset(&set);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&set, faults[i]);
  pthread_sigmask(SIG_SETMASK, &set, before);
}

static int start_members(kt_pool *pool) {
  pthread_attr_t attributes;
  sigset_t before;
  int started = 1;
  if (pthread_attr_init(&attributes) != 0) return 0;
  pthread_attr_setstacksize(&attributes, STACK_SIZE);
  block_signals(&before);
  for (; started < pool->threads; started++)
    if (pthread_create(&pool->members[started].thread, &attributes, work,
                       pool->members + started) != 0)
      break;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return started;
}

static void start_job(kt_pool *pool, kt_job *job, void *context) {
  pool->job = job;
  pool->context = context;
  atomic_store_explicit(&pool->finished, 0, memory_order_relaxed);
  atomic_fetch_add_explicit(&pool->generation, 1, memory_order_release);
  kt_wait_wake(&pool->generation, &pool->sleepers);
}

static void wait_for_members(kt_pool *pool, int32_t members) {
  for (unsigned done;
       (done = atomic_load_explicit(&pool->finished, memory_order_acquire)) != (unsigned)members;)
    kt_wait_awake(&pool->finished, done);
}

/* ---- Creation -------------------------------------------------------------------- */

static kt_status check_nodes(int32_t threads, const int32_t *nodes) {
  if (!nodes) return KT_OK;
  if (nodes[0] != 0) return KT_ERR_ARGUMENT;
  for (int32_t t = 1; t < threads; t++)
    if (nodes[t] < nodes[t - 1] || nodes[t] > nodes[t - 1] + 1) return KT_ERR_ARGUMENT;
  return KT_OK;
}

static kt_pool *new_pool(int32_t threads, const int32_t *cpus, const int32_t *nodes) {
  kt_pool *pool = aligned_alloc(KT_CACHE_LINE, sizeof *pool);
  member *members = calloc((size_t)threads, sizeof *members);
  if (!pool || !members) {
    free(pool), free(members);
    return NULL;
  }
  memset(pool, 0, sizeof *pool);
  *pool = (kt_pool){.threads = threads, .owner = getpid(), .members = members};
  pool->nodes = nodes ? nodes[threads - 1] + 1 : 1;
  pool->placed = cpus && pool->nodes > 1;
  pthread_mutex_init(&pool->one_job, NULL);
  for (int32_t t = 0; t < threads; t++)
    members[t] = (member){
        .pool = pool, .index = t, .cpu = cpus ? cpus[t] : -1, .node = nodes ? nodes[t] : 0};
  return pool;
}

static void stop_members(kt_pool *pool, int started) {
  pool->stop = 1;
  start_job(pool, NULL, NULL);
  for (int t = 1; t < started; t++) pthread_join(pool->members[t].thread, NULL);
}

static void free_pool(kt_pool *pool) {
  pthread_mutex_destroy(&pool->one_job);
  free(pool->members);
  free(pool);
}

kt_status kt_pool_create(int32_t threads, const int32_t *cpus, const int32_t *nodes,
                         kt_pool **pool) {
  if (!pool || threads < 1 || threads > MAX_THREADS) return KT_ERR_ARGUMENT;
  const kt_status status = check_nodes(threads, nodes);
  if (status != KT_OK) return status;
  kt_pool *made = new_pool(threads, cpus, nodes);
  if (!made) return KT_ERR_THREADS;
  const int started = start_members(made);
  if (started < threads) {
    stop_members(made, started);
    free_pool(made);
    return KT_ERR_THREADS;
  }
  *pool = made;
  return KT_OK;
}

void kt_pool_destroy(kt_pool *pool) {
  if (!pool) return;
  if (pool->owner == getpid()) stop_members(pool, pool->threads);
  free_pool(pool);
}

int32_t kt_pool_threads(const kt_pool *pool) { return pool->threads; }

int32_t kt_pool_nodes(const kt_pool *pool) { return pool->nodes; }

int32_t kt_pool_node_of(const kt_pool *pool, int32_t thread) { return pool->members[thread].node; }

int32_t kt_pool_rank(const kt_pool *pool, int32_t thread) {
  int32_t first = thread;
  while (first > 0 && pool->members[first - 1].node == pool->members[thread].node) first--;
  return thread - first;
}

int32_t kt_pool_node_threads(const kt_pool *pool, int32_t node) {
  int32_t count = 0;
  for (int32_t t = 0; t < pool->threads; t++) count += pool->members[t].node == node;
  return count;
}

/* ---- Jobs ------------------------------------------------------------------------- */

/* The caller works for node 0 on a host with several; afterwards it may run where it could. */
static void run_placed(kt_pool *pool, kt_job *job, void *context) {
#if defined(__linux__)
  cpu_set_t before;
  const int known =
      pool->placed && pthread_getaffinity_np(pthread_self(), sizeof before, &before) == 0;
  if (known) move_to_cpus(pool, 0, -1);
  job(context, 0);
  if (known) pthread_setaffinity_np(pthread_self(), sizeof before, &before);
#else
  (void)pool;
  job(context, 0);
#endif
}

kt_status kt_pool_run(kt_pool *pool, kt_job *job, void *context) {
  if (pool->owner != getpid()) return KT_ERR_THREADS;
  pthread_mutex_lock(&pool->one_job);
  if (pool->threads > 1) start_job(pool, job, context);
  run_placed(pool, job, context);
  wait_for_members(pool, pool->threads > 1 ? pool->threads - 1 : 0);
  pthread_mutex_unlock(&pool->one_job);
  return KT_OK;
}

static void nothing(void *context, int32_t thread) { (void)context, (void)thread; }

kt_status kt_pool_empty(kt_pool *pool, int64_t times) {
  if (!pool || times < 0) return KT_ERR_ARGUMENT;
  for (int64_t i = 0; i < times; i++) {
    const kt_status status = kt_pool_run(pool, nothing, NULL);
    if (status != KT_OK) return status;
  }
  return KT_OK;
}
