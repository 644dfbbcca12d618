/* The pool: creation, jobs, placement of threads. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "pool.h"

#include "../simd/float_mode.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

/* CPUs: as many as Linux can be built for. Stack: reserved, and used as far as jobs need it. */
enum {
  MAX_THREADS = 4096,
  MAX_CPUS = 8192,
  STACK_SIZE = 1 << 20,
  SLICE_NS = 100000,
  CROWDED_JOBS = 1000
};

typedef struct member {
  struct kt_pool *pool;
  pthread_t thread;
  int32_t index, cpu, node, rank;
} member;

struct kt_pool {
  int32_t threads, nodes;
  pid_t owner;
  member *members;       /* [threads]; 0 is the caller and has no thread */
  int32_t *first_thread; /* [nodes + 1] */
  pthread_mutex_t one_job;
  kt_job *job; /* NULL: members end */
  void *context;
  int32_t crowded; /* so many more jobs run with short time slices */
  _Alignas(KT_CACHE_LINE) kt_turn started;
  kt_gathering done; /* members that have finished this job */
  _Alignas(KT_CACHE_LINE) kt_turn finished;
};

/* ---- Scheduling --------------------------------------------------------------- *
 *
 * All wishes: a CPU that is offline or not for this process, say, changes nothing. */

#if defined(__linux__)

enum { CPU_SETS = MAX_CPUS / CPU_SETSIZE };

typedef struct cpu_mask {
  cpu_set_t sets[CPU_SETS]; /* one cpu_set_t ends at CPU 1023 */
} cpu_mask;

static int get_cpus(cpu_mask *mask) {
  return pthread_getaffinity_np(pthread_self(), sizeof *mask, mask->sets) == 0;
}

static void set_cpus(const cpu_mask *mask) {
  pthread_setaffinity_np(pthread_self(), sizeof *mask, mask->sets);
}

static void move_to(int32_t cpu) {
  cpu_mask mask;
  CPU_ZERO_S(sizeof mask, mask.sets);
  CPU_SET_S((size_t)cpu, sizeof mask, mask.sets);
  set_cpus(&mask);
}

/* The kernel's struct sched_attr, version 0; not in all C libraries. */
typedef struct scheduling {
  uint32_t size, policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime, deadline, period;
} scheduling;

typedef struct caller {
  int moved, shortened;
  cpu_mask cpus;
  scheduling scheduling;
} caller;

static int get_scheduling(scheduling *now) {
  return (int)syscall(SYS_sched_getattr, 0, now, sizeof *now, 0);
}

static void set_scheduling(scheduling *wanted) {
  wanted->size = sizeof *wanted;
  syscall(SYS_sched_setattr, 0, wanted, 0);
}

/* Asks for short time slices (Linux 6.12; older ones ignore it): no larger share of the CPU, but
 * a turn soon after waking. Otherwise, on a CPU that another program keeps busy, each yield or
 * sleep costs the rest of that program's slice, some milliseconds. For all threads or for none:
 * who yields does not give way to threads whose slices are longer. Returns 0 where it changed
 * nothing. */
static int shorten_slices(scheduling *before) {
  if (get_scheduling(before) != 0 || before->policy != SCHED_OTHER) return 0;
  scheduling wanted = *before;
  wanted.runtime = SLICE_NS;
  set_scheduling(&wanted);
  return 1;
}

/* The caller's thread belongs to the program: it works like a member and is then put back. That
 * costs 4 us for its time slices, so only while others want the CPUs. It is moved only where
 * the job's speed depends on its node. */
static void enter(const kt_pool *pool, caller *was) {
  const int32_t cpu = pool->nodes > 1 ? pool->members[0].cpu : -1;
  was->shortened = pool->crowded && shorten_slices(&was->scheduling);
  was->moved = cpu >= 0 && get_cpus(&was->cpus);
  if (was->moved) move_to(cpu);
}

static void leave(caller *was) {
  if (was->moved) set_cpus(&was->cpus);
  if (was->shortened) set_scheduling(&was->scheduling);
}

#else

typedef struct scheduling {
  int nothing;
} scheduling;

typedef struct caller {
  int nothing;
} caller;

static void move_to(int32_t cpu) { (void)cpu; }
static int shorten_slices(scheduling *before) { return (void)before, 0; }
static void set_scheduling(scheduling *wanted) { (void)wanted; }
static void enter(const kt_pool *pool, caller *was) { (void)pool, (void)was; }
static void leave(caller *was) { (void)was; }

#endif

/* ---- Members ------------------------------------------------------------------ */

static void finish(kt_pool *pool, const member *self) {
  if (kt_gathering_come(&pool->done, self->index - 1)) kt_turn_next(&pool->finished);
}

/* As the caller does in enter(), at the changes only. */
static void follow_crowd(const kt_pool *pool, int *shortened, scheduling *before) {
  if (*shortened && !pool->crowded) {
    set_scheduling(before);
    *shortened = 0;
  } else if (!*shortened && pool->crowded) {
    *shortened = shorten_slices(before);
  }
}

static void *work(void *argument) {
  const member *self = argument;
  kt_pool *pool = self->pool;
  kt_float_mode_enter(); /* not the creator's */
  scheduling before;
  int shortened = 0;
  if (self->cpu >= 0) move_to(self->cpu);
  for (unsigned turn = 0;; turn += 2) {
    kt_turn_wait(&pool->started, turn);
    if (!pool->job) return NULL;
    follow_crowd(pool, &shortened, &before);
    pool->job(pool->context, self->index);
    finish(pool, self);
  }
}

/* Signals are for the threads of the program, except those that a job's own instructions
 * raise: blocked, they would end the process in place of reaching its handler. */
static void block_signals(sigset_t *before) {
  static const int raised[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS};
  sigset_t set;
  sigfillset(&set);
  for (size_t i = 0; i < sizeof raised / sizeof *raised; i++) sigdelset(&set, raised[i]);
  pthread_sigmask(SIG_SETMASK, &set, before);
}

/* Number of members that are there then, the caller included. */
static int32_t start_members(kt_pool *pool) {
  pthread_attr_t attributes;
  sigset_t before;
  int32_t count = 1;
  if (pthread_attr_init(&attributes) != 0) return count;
  pthread_attr_setstacksize(&attributes, STACK_SIZE);
  block_signals(&before); /* threads inherit it */
  for (; count < pool->threads; count++) {
    member *next = pool->members + count;
    if (pthread_create(&next->thread, &attributes, work, next) != 0) break;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return count;
}

static void stop_members(kt_pool *pool, int32_t count) {
  pool->job = NULL;
  kt_turn_next(&pool->started);
  for (int32_t t = 1; t < count; t++) pthread_join(pool->members[t].thread, NULL);
}

/* ---- Creation -------------------------------------------------------------------- */

static kt_status check_places(int32_t threads, const int32_t *cpus, const int32_t *nodes) {
  for (int32_t t = 0; t < threads; t++) {
    if (cpus && (cpus[t] < -1 || cpus[t] >= MAX_CPUS)) return KT_ERR_ARGUMENT;
    const int32_t last = nodes && t ? nodes[t - 1] : 0;
    if (nodes && (nodes[t] < last || nodes[t] > last + (t > 0))) return KT_ERR_ARGUMENT;
  }
  return KT_OK;
}

static void place_members(kt_pool *pool, const int32_t *cpus, const int32_t *nodes) {
  for (int32_t t = 0; t < pool->threads; t++) {
    member *m = pool->members + t;
    m->pool = pool;
    m->index = t;
    m->cpu = cpus ? cpus[t] : -1;
    m->node = nodes ? nodes[t] : 0;
    m->rank = t && m[-1].node == m->node ? m[-1].rank + 1 : 0;
    if (!m->rank) pool->first_thread[m->node] = t;
  }
  pool->nodes = pool->members[pool->threads - 1].node + 1;
  pool->first_thread[pool->nodes] = pool->threads;
}

static kt_pool *new_pool(int32_t threads) {
  kt_pool *pool = aligned_alloc(KT_CACHE_LINE, sizeof *pool);
  member *members = calloc((size_t)threads, sizeof *members);
  int32_t *first_thread = calloc((size_t)threads + 1, sizeof *first_thread);
  if (!pool || !members || !first_thread || pthread_mutex_init(&pool->one_job, NULL) != 0) {
    free(first_thread);
    free(members);
    free(pool);
    return NULL;
  }
  pool->threads = threads;
  pool->members = members;
  pool->first_thread = first_thread;
  pool->owner = getpid();
  pool->crowded = 0;
  kt_turn_init(&pool->started);
  kt_turn_init(&pool->finished);
  kt_gathering_init(&pool->done, threads - 1);
  return pool;
}

static void free_pool(kt_pool *pool) {
  pthread_mutex_destroy(&pool->one_job);
  free(pool->first_thread);
  free(pool->members);
  free(pool);
}

kt_status kt_pool_create(int32_t threads, const int32_t *cpus, const int32_t *nodes,
                         kt_pool **pool) {
  if (!pool || threads < 1 || threads > MAX_THREADS) return KT_ERR_ARGUMENT;
  const kt_status status = check_places(threads, cpus, nodes);
  if (status != KT_OK) return status;
  kt_pool *made = new_pool(threads);
  if (!made) return KT_ERR_THREADS;
  place_members(made, cpus, nodes);
  const int32_t count = start_members(made);
  if (count < threads) {
    stop_members(made, count);
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

int32_t kt_pool_threads(const kt_pool *pool) { return pool ? pool->threads : 0; }

int32_t kt_pool_nodes(const kt_pool *pool) { return pool ? pool->nodes : 0; }

int32_t kt_pool_node_of(const kt_pool *pool, int32_t thread) { return pool->members[thread].node; }

int32_t kt_pool_rank(const kt_pool *pool, int32_t thread) { return pool->members[thread].rank; }

int32_t kt_pool_first_thread(const kt_pool *pool, int32_t node) { return pool->first_thread[node]; }

int32_t kt_pool_node_threads(const kt_pool *pool, int32_t node) {
  return pool->first_thread[node + 1] - pool->first_thread[node];
}

/* ---- Jobs ------------------------------------------------------------------------- */

/* Members that are late by more than a job's imbalance had to wait for a CPU. */
static void run_with_members(kt_pool *pool, kt_job *job, void *context) {
  const unsigned turn = kt_turn_now(&pool->finished);
  pool->job = job;
  pool->context = context;
  kt_turn_next(&pool->started);
  job(context, 0);
  if (kt_turn_wait(&pool->finished, turn))
    pool->crowded = CROWDED_JOBS;
  else if (pool->crowded)
    pool->crowded--;
}

kt_status kt_pool_run(kt_pool *pool, kt_job *job, void *context) {
  caller was;
  if (pool->owner != getpid()) return KT_ERR_THREADS;
  pthread_mutex_lock(&pool->one_job);
  enter(pool, &was);
  if (pool->threads > 1)
    run_with_members(pool, job, context);
  else
    job(context, 0);
  leave(&was);
  pthread_mutex_unlock(&pool->one_job);
  return KT_OK;
}

static void nothing(void *context, int32_t thread) { (void)context, (void)thread; }

kt_status kt_pool_empty(kt_pool *pool, int64_t times) {
  if (!pool || times < 0) return KT_ERR_ARGUMENT;
  kt_status status = KT_OK;
  for (int64_t i = 0; i < times && status == KT_OK; i++) status = kt_pool_run(pool, nothing, NULL);
  return status;
}
