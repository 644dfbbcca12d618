/* What threads of a pool cost one another, from few to many more than there are CPUs.
 *
 *     cc -std=c11 -O2 -pthread -Inative/include native/test/pool_crowd.c native/src/pool/[a-z]*.c
 *
 * The arguments are numbers of threads. For each: the time to start them and to end them; of a job
 * that does nothing; of a barrier; of a job with as many barriers as a layer's forward has, which
 * is what synchronisation costs a layer in a decode step; and the items of a share that the threads
 * took, in proportion to an even share. Figures are printed and not judged, sums are. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "../src/pool/pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Of a forward of one batch: input quantized, first products, second products, sums of parts. */
enum { MOST = 4096, BARRIERS = 4, ITEMS_EACH = 64, WORK = 20000 };

static const double measured_for = 0.2; /* seconds of each figure, and at least so many: */
enum { LEAST_ROUNDS = 10 };

static int failures;

static void expect(int good, const char *what) {
  if (good) return;
  failures++;
  printf("failed: %s\n", what);
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct context {
  kt_barrier barrier;
  kt_share share;
  int32_t barriers;
  int64_t taken[MOST];    /* items, by thread; plain */
  int64_t finished[MOST]; /* jobs, by thread; plain */
} context;

static context shared;

static void synchronise(void *argument, int32_t thread) {
  context *c = argument;
  for (int32_t i = 0; i < c->barriers; i++) kt_barrier_wait(&c->barrier, thread);
  c->finished[thread]++;
}

static void take(void *argument, int32_t thread) {
  context *c = argument;
  kt_barrier_wait(&c->barrier, thread); /* all begin at once */
  for (int64_t first, count; kt_share_take(&c->share, &first, &count);) {
    volatile uint32_t number = (uint32_t)first;
    for (int64_t i = 0; i < count * WORK; i++) number = number * 1664525u + 1013904223u;
    c->taken[thread] += count;
  }
}

/* Microseconds of a job with so many barriers. */
static double job_time(kt_pool *pool, int32_t barriers) {
  const int32_t threads = kt_pool_threads(pool);
  int64_t rounds = 0;
  shared.barriers = barriers;
  for (int32_t t = 0; t < threads; t++) shared.finished[t] = 0;
  kt_pool_run(pool, synchronise, &shared);
  const double start = seconds();
  while (rounds < LEAST_ROUNDS || seconds() - start < measured_for) {
    kt_pool_run(pool, synchronise, &shared);
    rounds++;
  }
  const double time = (seconds() - start) / (double)rounds;
  for (int32_t t = 0; t < threads; t++)
    expect(shared.finished[t] == rounds + 1, "every thread runs every job once");
  return 1e6 * time;
}

static int ascending(const void *a, const void *b) {
  const int64_t one = *(const int64_t *)a, other = *(const int64_t *)b;
  return (one > other) - (one < other);
}

static void print_shares(kt_pool *pool) {
  const int32_t threads = kt_pool_threads(pool);
  const int64_t items = (int64_t)threads * ITEMS_EACH;
  int64_t sum = 0;
  for (int32_t t = 0; t < threads; t++) shared.taken[t] = 0;
  kt_share_init(&shared.share, items, 1, threads);
  kt_pool_run(pool, take, &shared);
  for (int32_t t = 0; t < threads; t++) sum += shared.taken[t];
  expect(sum == items, "every item is taken once");
  qsort(shared.taken, (size_t)threads, sizeof *shared.taken, ascending);
  printf("%.2f %.2f %.2f", (double)shared.taken[0] / ITEMS_EACH,
         (double)shared.taken[threads / 2] / ITEMS_EACH,
         (double)shared.taken[threads - 1] / ITEMS_EACH);
}

static void measure(int32_t threads, int32_t cpus) {
  static int32_t cpu[MOST], node[MOST];
  for (int32_t t = 0; t < threads; t++) cpu[t] = threads <= cpus ? t : -1, node[t] = 0;
  kt_pool *pool = NULL;
  double start = seconds();
  if (kt_pool_create(threads, cpu, node, &pool) != KT_OK) {
    expect(0, "a pool can be made");
    return;
  }
  kt_pool_empty(pool, 1);
  const double started = seconds() - start;
  kt_barrier_init(&shared.barrier, threads);
  const double empty = job_time(pool, 0), step = job_time(pool, BARRIERS);
  printf("%d threads: start %.2f ms, job %.1f us, barrier %.1f us, layer %.1f us, shares ", threads,
         1e3 * started, empty, (step - empty) / BARRIERS, step);
  print_shares(pool);
  start = seconds();
  kt_pool_destroy(pool);
  printf(" (least, median, most), end %.2f ms\n", 1e3 * (seconds() - start));
  fflush(stdout);
}

int main(int count, char **words) {
  const int32_t cpus = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
  printf("%d CPUs\n", cpus);
  for (int i = 1; i < count; i++) {
    const int threads = atoi(words[i]);
    if (threads < 1 || threads > MOST) {
      printf("%s is not a number of threads\n", words[i]);
      return 2;
    }
    measure(threads, cpus);
  }
  printf("crowd: %d failures\n", failures);
  return failures != 0;
}
