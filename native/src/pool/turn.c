/* Waiting: spin for a moment, then yield the CPU between looks, then sleep. A step of a model
 * mostly finds its threads awake, while a busy machine and an idle pool cost no one their CPU. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "turn.h"

#include <sched.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>
#endif

/* Measured, benchmarks/pool.py. A yield costs 0.3 us where nobody else wants the CPU, so long
 * spinning gains nothing; and while the thread that is waited for sits on this very CPU, it
 * only delays both. A model's steps come every few hundred microseconds: threads stay awake for
 * that long. Sleeping threads cost the next job some 8 us. */
enum { LOOKS = 8, SPIN_NS = 500, AWAKE_NS = 500000 };

static void pause_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb"); /* "yield" takes no time on most cores */
#endif
}

int64_t kt_nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- Asleep ---------------------------------------------------------------- */

#if defined(__linux__)

/* Who is woken wakes others, so that a call of 255 sleeping threads does not wait for as many
 * wake-ups, 1 to 2 us each, but for 8; and a thread that gets no CPU holds back few. */
enum { WAKES = 8 };

/* Who sleeps until one turn is over is not woken instead of who still sleeps through the turn
 * before: threads are at most one turn apart. */
static uint32_t bed_of(unsigned turn) { return 1u << (turn / 2 % 32); }

static void sleep_while(kt_turn *turn, unsigned value) {
  syscall(SYS_futex, turn, FUTEX_WAIT_BITSET_PRIVATE, value, NULL, NULL, bed_of(value));
}

static void wake(kt_turn *turn, unsigned over) {
  syscall(SYS_futex, turn, FUTEX_WAKE_BITSET_PRIVATE, WAKES, NULL, NULL, bed_of(over));
}

static void pass_on(kt_turn *turn, unsigned over) { wake(turn, over); }

#else

/* One for all turns: sleeping is rare, and whoever wakes for another's turn looks and sleeps
 * on. A child gets a new one: the lock may be held in the parent, and those who sleep there
 * are not in the child. */
static pthread_mutex_t bed_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bed = PTHREAD_COND_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void after_fork(void) {
  pthread_mutex_init(&bed_lock, NULL);
  pthread_cond_init(&bed, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, after_fork); }

static void sleep_while(kt_turn *turn, unsigned value) {
  pthread_once(&fork_once, watch_forks);
  pthread_mutex_lock(&bed_lock);
  while (atomic_load_explicit(turn, memory_order_acquire) == value)
    pthread_cond_wait(&bed, &bed_lock);
  pthread_mutex_unlock(&bed_lock);
}

/* The lock orders this behind a sleeper that has looked but does not wait yet. */
static void wake(kt_turn *turn, unsigned over) {
  (void)turn, (void)over;
  pthread_mutex_lock(&bed_lock);
  pthread_cond_broadcast(&bed);
  pthread_mutex_unlock(&bed_lock);
}

/* All are awake. */
static void pass_on(kt_turn *turn, unsigned over) { (void)turn, (void)over; }

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
  pass_on(turn, now);
}

/* ---- Awake ------------------------------------------------------------------- */

static int passed(kt_turn *turn, unsigned now) { return kt_turn_now(turn) != now; }

static int spin(kt_turn *turn, unsigned now) {
  for (int i = 0; i < LOOKS; i++) {
    if (passed(turn, now)) return 1;
    pause_cpu();
  }
  return 0;
}

int kt_turn_wait(kt_turn *turn, unsigned now) {
  if (spin(turn, now)) return 0;
  const int64_t start = kt_nanoseconds();
  for (int64_t time = start; time < start + AWAKE_NS; time = kt_nanoseconds()) {
    if (time >= start + SPIN_NS) sched_yield();
    if (spin(turn, now)) return kt_nanoseconds() >= start + AWAKE_NS;
  }
  wait_asleep(turn, now);
  return 1;
}

void kt_turn_next(kt_turn *turn) {
  const unsigned next = kt_turn_now(turn) + 2;
  if (atomic_exchange_explicit(turn, next, memory_order_acq_rel) & 1) wake(turn, next - 2);
}
