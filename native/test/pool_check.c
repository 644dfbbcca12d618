/* Threads, barriers and shares, without Python: for the sanitizers.
 *
 *     cc -std=c11 -pthread -Inative/include native/test/pool_check.c native/src/pool/[a-z]*.c
 *
 * What the threads hand to one another lies in plain memory, so that -fsanitize=thread sees any
 * missing order. With -U__linux__ the portable way of sleeping is checked on Linux. An argument
 * leaves forks out, for emulators. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "../src/pool/pool.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

/* CROWD: of several groups of a gathering, not all full, and of more sleepers than one wakes. */
enum { THREADS = 8, ITEMS = 5000, PHASES = 200, CROWD = 150 };

static int failures;

static void expect(int good, const char *what) {
  if (good) return;
  failures++;
  printf("failed: %s\n", what);
}

static void nap(long milliseconds) {
  const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static kt_pool *new_pool(int32_t threads) {
  kt_pool *pool = NULL;
  if (kt_pool_create(threads, NULL, NULL, &pool) != KT_OK) {
    printf("no pool of %d\n", threads);
    exit(1);
  }
  return pool;
}

/* ---- Jobs ---------------------------------------------------------------------- */

typedef struct count_context {
  int64_t input;
  int64_t output[CROWD]; /* plain */
} count_context;

static void count_job(void *context, int32_t thread) {
  count_context *c = context;
  c->output[thread] += c->input + thread;
}

/* Every thread runs every job once, sees what the caller wrote, and the caller sees its work;
 * `pause` lets the members fall asleep before some of them. */
static void check_jobs(kt_pool *pool, int32_t jobs, int pause) {
  count_context c = {0};
  int64_t sum = 0;
  for (int32_t i = 0; i < jobs; i++) {
    c.input = i;
    sum += i;
    if (pause && i % 16 == 0) nap(2);
    expect(kt_pool_run(pool, count_job, &c) == KT_OK, "run");
  }
  for (int32_t t = 0; t < kt_pool_threads(pool); t++)
    expect(c.output[t] == sum + (int64_t)t * jobs, "every thread runs every job once");
}

typedef struct caller {
  kt_pool *pool;
  int64_t *total; /* plain: runs of one pool must not overlap */
} caller;

static void add_job(void *context, int32_t thread) {
  if (thread == 0) ++*(int64_t *)context;
}

static void *call(void *argument) {
  caller *c = argument;
  for (int i = 0; i < 300; i++) kt_pool_run(c->pool, add_job, c->total);
  return NULL;
}

static void check_callers(void) {
  kt_pool *pool = new_pool(3);
  int64_t total = 0;
  caller c = {pool, &total};
  pthread_t callers[4];
  for (int i = 0; i < 4; i++) pthread_create(callers + i, NULL, call, &c);
  for (int i = 0; i < 4; i++) pthread_join(callers[i], NULL);
  expect(total == 1200, "calls from several threads come one after the other");
  kt_pool_destroy(pool);
}

/* ---- Barrier --------------------------------------------------------------------- */

typedef struct barrier_context {
  kt_barrier barrier;
  int32_t threads, phases;
  int phase[CROWD]; /* plain */
  int wrong[CROWD];
} barrier_context;

static void barrier_job(void *context, int32_t thread) {
  barrier_context *c = context;
  for (int phase = 1; phase <= c->phases; phase++) {
    c->phase[thread] = phase;
    if (phase % 64 == 0 && thread == phase % c->threads) nap(2); /* the others fall asleep */
    kt_barrier_wait(&c->barrier, thread);
    for (int32_t t = 0; t < c->threads; t++) c->wrong[thread] += c->phase[t] != phase;
    kt_barrier_wait(&c->barrier, thread);
  }
}

static void check_barrier(kt_pool *pool, int32_t phases) {
  static barrier_context c;
  memset(c.wrong, 0, sizeof c.wrong);
  c.threads = kt_pool_threads(pool), c.phases = phases;
  kt_barrier_init(&c.barrier, c.threads);
  kt_pool_run(pool, barrier_job, &c);
  for (int32_t t = 0; t < c.threads; t++) expect(c.wrong[t] == 0, "a barrier holds all back");
}

/* ---- Many threads -------------------------------------------------------------------- */

/* Exactly one is the last, of any number, also when all come again. */
static void check_gathering(void) {
  static kt_gathering g;
  for (int32_t count = 1; count <= 300; count++) {
    kt_gathering_init(&g, count);
    for (int32_t round = 0; round < 2; round++) {
      for (int32_t t = 0; t < count; t++) {
        const int is_last = kt_gathering_come(&g, round ? count - 1 - t : t);
        expect(is_last == (t == count - 1), "only the last of those who come is the last");
      }
    }
  }
}

static void check_crowd(void) {
  for (int32_t threads = 9; threads <= CROWD; threads += 47) {
    kt_pool *pool = new_pool(threads);
    check_jobs(pool, 100, 1);
    check_barrier(pool, 64);
    nap(3);
    check_jobs(pool, 1, 0);
    kt_pool_destroy(pool);
  }
}

/* ---- Share ----------------------------------------------------------------------- */

typedef struct share_context {
  kt_share share;
  int64_t begin, items, grain;
  int taken[ITEMS]; /* plain: two takers of one item would race */
  int wrong[THREADS];
} share_context;

static void share_job(void *context, int32_t thread) {
  share_context *c = context;
  int64_t last = c->items + 1;
  for (int64_t first, count; kt_share_take(&c->share, &first, &count);) {
    const int inside = first >= c->begin && count > 0 && first + count <= c->items;
    const int fair = count >= c->grain || first + count == c->items;
    if (!inside || !fair || count > last) c->wrong[thread]++;
    last = count > c->grain ? count : c->grain;
    for (int64_t i = first; inside && i < first + count; i++) c->taken[i]++;
  }
}

/* Items begin .. items - 1. */
static void check_share(kt_pool *pool, int64_t begin, int64_t items, int64_t grain) {
  static share_context c;
  memset(&c.taken, 0, sizeof c.taken);
  memset(&c.wrong, 0, sizeof c.wrong);
  c.begin = begin, c.items = items;
  c.grain = grain < 1 ? 1 : grain;
  if (begin)
    kt_share_init_range(&c.share, begin, items, grain, kt_pool_threads(pool));
  else
    kt_share_init(&c.share, items, grain, kt_pool_threads(pool));
  kt_pool_run(pool, share_job, &c);
  for (int32_t t = 0; t < kt_pool_threads(pool); t++)
    expect(c.wrong[t] == 0, "runs lie inside, are at least a grain and do not grow");
  for (int64_t i = 0; i < items; i++)
    expect(c.taken[i] == (i >= begin), "every item is taken once");
}

/* ---- Members ----------------------------------------------------------------------- */

typedef struct member_context {
  int rounds_up[THREADS], faults_blocked[THREADS], others_open[THREADS];
} member_context;

static int rounds_up(void) {
  volatile float one = 1.0f, little = 1e-10f;
  return one + little > 1.0f;
}

static void member_job(void *context, int32_t thread) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  member_context *c = context;
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
    c->faults_blocked[thread] += sigismember(&blocked, faults[i]);
  c->others_open[thread] = !sigismember(&blocked, SIGINT) + !sigismember(&blocked, SIGALRM);
  c->rounds_up[thread] = rounds_up();
}

/* Signals and the floating-point mode of members, whatever those of their creator are. */
static void check_members(void) {
  member_context c = {0};
  fesetround(FE_UPWARD);
  kt_pool *pool = new_pool(4);
  kt_pool_run(pool, member_job, &c);
  fesetround(FE_TONEAREST);
  for (int t = 1; t < 4; t++) {
    expect(!c.rounds_up[t], "members have the default float mode");
    expect(c.faults_blocked[t] == 0, "a job's own faults reach their handlers");
    expect(c.others_open[t] == 0, "members leave the program's signals alone");
  }
  expect(c.rounds_up[0] && c.others_open[0] == 2, "the caller stays as it is");
  kt_pool_destroy(pool);
}

static void check_nodes(void) {
  static const int32_t nodes[] = {0, 0, 1, 1, 1, 2};
  static const int32_t ranks[] = {0, 1, 0, 1, 2, 0};
  kt_pool *pool = NULL;
  expect(kt_pool_create(6, NULL, nodes, &pool) == KT_OK, "three nodes");
  expect(kt_pool_nodes(pool) == 3 && kt_pool_threads(pool) == 6, "counts");
  for (int32_t t = 0; t < 6; t++)
    expect(kt_pool_node_of(pool, t) == nodes[t] && kt_pool_rank(pool, t) == ranks[t] &&
               kt_pool_first_thread(pool, nodes[t]) == t - ranks[t],
           "places");
  expect(kt_pool_first_thread(pool, 3) == 6, "the end of the last node");
  expect(kt_pool_node_threads(pool, 0) == 2 && kt_pool_node_threads(pool, 1) == 3 &&
             kt_pool_node_threads(pool, 2) == 1,
         "threads of a node");
  check_jobs(pool, 50, 0);
  kt_pool_destroy(pool);
}

static void check_refusals(void) {
  static const int32_t late[] = {1, 1}, gap[] = {0, 2}, down[] = {0, 1, 0}, below[] = {-1, 0};
  static const int32_t cpus[] = {0, 8192}, negative[] = {-2, 0};
  kt_pool *pool = NULL;
  expect(kt_pool_create(0, NULL, NULL, &pool) == KT_ERR_ARGUMENT, "no threads");
  expect(kt_pool_create(4097, NULL, NULL, &pool) == KT_ERR_ARGUMENT, "too many threads");
  expect(kt_pool_create(2, NULL, NULL, NULL) == KT_ERR_ARGUMENT, "nowhere to put it");
  expect(kt_pool_create(2, NULL, late, &pool) == KT_ERR_ARGUMENT, "node 0 left out");
  expect(kt_pool_create(2, NULL, gap, &pool) == KT_ERR_ARGUMENT, "a node left out");
  expect(kt_pool_create(3, NULL, down, &pool) == KT_ERR_ARGUMENT, "descending nodes");
  expect(kt_pool_create(2, NULL, below, &pool) == KT_ERR_ARGUMENT, "a negative node");
  expect(kt_pool_create(2, cpus, NULL, &pool) == KT_ERR_ARGUMENT, "a CPU beyond all");
  expect(kt_pool_create(2, negative, NULL, &pool) == KT_ERR_ARGUMENT, "a CPU below -1");
  expect(kt_pool_empty(NULL, 1) == KT_ERR_ARGUMENT, "no pool");
  expect(pool == NULL, "refusals make no pool");
  expect(kt_pool_threads(NULL) == 0 && kt_pool_nodes(NULL) == 0, "no pool has no threads");
  kt_pool_destroy(NULL);
}

/* ---- Placement ---------------------------------------------------------------------- */

#if defined(__linux__)

static void where_job(void *context, int32_t thread) {
  ((int32_t *)context)[thread] = sched_getcpu();
}

/* With several nodes all threads run on their CPUs, and the caller is put back afterwards;
 * with one the caller is left alone. An impossible CPU changes nothing. */
static void check_placement(void) {
  cpu_set_t before, after;
  int32_t cpus[3] = {-1, -1, 4000}, where[3] = {-1, -1, -1};
  static const int32_t nodes[] = {0, 1, 1};
  sched_getaffinity(0, sizeof before, &before);
  for (int32_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET((size_t)cpu, &before)) cpus[cpus[0] < 0 ? 0 : 1] = cpu;
  kt_pool *pool = NULL;
  expect(kt_pool_create(3, cpus, nodes, &pool) == KT_OK, "placed");
  for (int i = 0; i < 20; i++) {
    kt_pool_run(pool, where_job, where);
    expect(where[0] == cpus[0], "the caller works on its CPU");
    expect(cpus[1] < 0 || where[1] == cpus[1], "a member works on its CPU");
    expect(CPU_ISSET((size_t)where[2], &before), "a member without a CPU works anywhere");
    sched_getaffinity(0, sizeof after, &after);
    expect(CPU_EQUAL(&before, &after), "the caller may run where it could before");
  }
  kt_pool_destroy(pool);
}

#else
static void check_placement(void) {}
#endif

/* ---- Fork ----------------------------------------------------------------------------- */

static int in_child(kt_pool *pool, kt_queue *queue) {
  int32_t threads = 0;
  kt_queue_destroy(queue);
  if (kt_pool_empty(pool, 1) != KT_ERR_THREADS) return 1;
  kt_pool_destroy(pool);
  if (kt_pool_create(3, NULL, NULL, &pool) != KT_OK) return 2;
  threads = kt_pool_threads(pool);
  if (kt_pool_empty(pool, 100) != KT_OK) return 3;
  nap(2);
  if (kt_pool_empty(pool, 100) != KT_OK) return 4;
  kt_pool_destroy(pool);
  return threads == 3 ? 0 : 5;
}

static void check_fork(void) {
  for (int asleep = 0; asleep < 2; asleep++) {
    kt_pool *pool = new_pool(3);
    kt_queue *queue = NULL;
    kt_pool_empty(pool, 10);
    expect(kt_queue_create(&queue) == KT_OK, "a queue");
    if (asleep) nap(3);
    fflush(stdout);
    const pid_t child = fork();
    int status = -1;
    if (child == 0) {
      alarm(20);
      _exit(in_child(pool, queue));
    }
    waitpid(child, &status, 0);
    expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child is refused and has its own");
    expect(kt_pool_empty(pool, 100) == KT_OK, "the parent goes on");
    kt_queue_destroy(queue);
    kt_pool_destroy(pool);
  }
}

/* ---- The queue: tasks of several starters, in plain memory ------------------------ */

enum { STARTERS = 4, STARTS = 500 };

typedef struct started {
  kt_task *own, *common;
  int64_t *log; /* by all tasks, without a lock: they run one after the other */
} started;

static void log_task(void *context) { ++*(int64_t *)context; }

static void *start_tasks(void *argument) {
  started *s = argument;
  for (int i = 0; i < STARTS; i++) {
    if (i % 100 == 99) nap(1); /* so that the queue sleeps */
    kt_task_start(s->own);
    kt_task_start(s->common);
    if (i % 3) kt_task_start(s->own); /* waits for the one before */
    if (i % 2) kt_task_wait(s->own);
    if (i % 7 == 0) kt_queue_drain(s->own->queue);
  }
  kt_task_wait(s->own);
  return NULL;
}

static void check_queue(void) {
  kt_queue *queue = NULL;
  int64_t log = 0, counts[3];
  pthread_t threads[STARTERS];
  kt_task tasks[STARTERS + 1];
  started starters[STARTERS];
  memset(tasks, 0, sizeof tasks);
  expect(kt_queue_create(NULL) == KT_ERR_ARGUMENT, "a queue without a place");
  expect(kt_queue_create(&queue) == KT_OK, "a queue");
  for (int i = 0; i <= STARTERS; i++)
    tasks[i] = (kt_task){.queue = queue, .run = log_task, .context = &log};
  for (int i = 0; i < STARTERS; i++) {
    starters[i] = (started){tasks + i, tasks + STARTERS, &log};
    pthread_create(threads + i, NULL, start_tasks, starters + i);
  }
  for (int i = 0; i < STARTERS; i++) pthread_join(threads[i], NULL);
  kt_queue_drain(queue);
  const int64_t own = STARTS + STARTS - (STARTS + 2) / 3;
  expect(log == STARTERS * (own + STARTS), "every start of a task has run");
  kt_task_counts(tasks, counts, counts + 1, counts + 2);
  expect(counts[0] == own && counts[1] == own, "counts of a task");
  expect(counts[2] == STARTS / 2 + 1, "waits of a task");
  kt_task_start(tasks);
  kt_queue_destroy(queue); /* does what was started */
  expect(log == STARTERS * (own + STARTS) + 1, "the last task has run");
}

int main(int argc, char **argv) {
  (void)argv;
  static const int64_t items[] = {0, 1, 2, THREADS, 97, ITEMS};
  alarm(120); /* a lost wake-up is a failure, not a hang */
  check_refusals();
  for (int32_t threads = 1; threads <= THREADS; threads++) {
    kt_pool *pool = new_pool(threads);
    check_jobs(pool, 1000, 0);
    check_jobs(pool, 64, 1);
    check_barrier(pool, PHASES);
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
      for (int64_t grain = 0; grain <= 64; grain = grain * 4 + 1)
        check_share(pool, 0, items[i], grain), check_share(pool, items[i] / 3, items[i], grain);
    kt_pool_destroy(pool);
  }
  check_queue();
  check_gathering();
  check_crowd();
  check_callers();
  check_members();
  check_nodes();
  check_placement();
  for (int i = 0; i < 200; i++) {
    kt_pool *pool = new_pool(1 + i % 4);
    if (i % 2) kt_pool_empty(pool, 3);
    kt_pool_destroy(pool);
  }
  if (!UNDER_TSAN && argc < 2) check_fork(); /* it cannot start threads in a child */
  printf("pool: %d failures\n", failures);
  return failures != 0;
}
