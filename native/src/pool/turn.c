/* Waiting: spin, then yield the CPU between looks, then sleep. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "turn.h"

#include <sched.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>
#endif

#ifndef SPIN_NS
#define SPIN_NS 5000
#endif
#ifndef AWAKE_NS
#define AWAKE_NS 500000
#endif
#ifndef TAKEN_NS
#define TAKEN_NS 20000
#endif
enum { LOOKS = 16 };

static void pause_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb"); /* "yield" takes no time on most cores */
#endif
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Asleep ---------------------------------------------------------------- */

#if defined(__linux__)

static void sleep_while(kt_turn *turn, unsigned value) {
  syscall(SYS_futex, turn, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(kt_turn *turn) {
  syscall(SYS_futex, turn, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

#else

/* One for all turns: sleeping is rare, and whoever wakes for another's turn looks and sleeps
 * on. Taken over a fork, so that the child does not inherit it locked. */
static pthread_mutex_t bed_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bed = PTHREAD_COND_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&bed_lock); }
static void after_fork(void) { pthread_mutex_unlock(&bed_lock); }
static void watch_forks(void) { pthread_atfork(before_fork, after_fork, after_fork); }

static void sleep_while(kt_turn *turn, unsigned value) {
  pthread_once(&fork_once, watch_forks);
  pthread_mutex_lock(&bed_lock);
  while (atomic_load_explicit(turn, memory_order_acquire) == value)
    pthread_cond_wait(&bed, &bed_lock);
  pthread_mutex_unlock(&bed_lock);
}

/* The lock orders this behind a sleeper that has looked but does not wait yet. */
static void wake_all(kt_turn *turn) {
  (void)turn;
  pthread_mutex_lock(&bed_lock);
  pthread_cond_broadcast(&bed);
  pthread_mutex_unlock(&bed_lock);
}

#endif

static void wait_asleep(kt_turn *turn, unsigned now) {
  unsigned seen = now;
  while ((seen & ~1u) == now) {
    if (seen == now && !atomic_compare_exchange_weak_explicit(
                           turn, &seen, now | 1, memory_order_acquire, memory_order_acquire))
      continue;
    sleep_while(turn, now | 1);
    seen = atomic_load_explicit(turn, memory_order_acquire);
  }
}

/* ---- Awake ------------------------------------------------------------------- */

static int spin(kt_turn *turn, unsigned now, int64_t end) {
  do {
    for (int i = 0; i < LOOKS; i++) {
      if (kt_turn_now(turn) != now) return 1;
      pause_cpu();
    }
  } while (nanoseconds() < end);
  return 0;
}

/* 1 when the turn has come. A yield that took long means that somebody wants this CPU. */
static int yield(kt_turn *turn, unsigned now, int64_t end) {
  for (int64_t before = nanoseconds(), after; before < end; before = after) {
    sched_yield();
    if (kt_turn_now(turn) != now) return 1;
    after = nanoseconds();
    if (after - before > TAKEN_NS) return 0;
  }
  return 0;
}

void kt_turn_wait(kt_turn *turn, unsigned now) {
  const int64_t start = nanoseconds();
  if (spin(turn, now, start + SPIN_NS) || yield(turn, now, start + AWAKE_NS)) return;
  wait_asleep(turn, now);
}

void kt_turn_next(kt_turn *turn) {
  const unsigned next = kt_turn_now(turn) + 2;
  if (atomic_exchange_explicit(turn, next, memory_order_acq_rel) & 1) wake_all(turn);
}
