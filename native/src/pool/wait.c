/* Spin, yield, sleep. Sleeping is a futex on Linux, short naps elsewhere. */
#if defined(__linux__)
#define _GNU_SOURCE
#else
#define _POSIX_C_SOURCE 200809L
#endif
#include "wait.h"

#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Spinning hides the few microseconds between the phases of a step; longer, and it would
 * hold a CPU that the thread waited for may need. Yielding lasts for about the gap between
 * two steps of a model. */
enum { SPINS = 2000, YIELD_NANOSECONDS = 500000 };

static void pause_cpu(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int changed(atomic_uint *word, unsigned old) {
  return atomic_load_explicit(word, memory_order_acquire) != old;
}

static int spin(atomic_uint *word, unsigned old) {
  for (int i = 0; i < SPINS; i++) {
    if (changed(word, old)) return 1;
    pause_cpu();
  }
  return 0;
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void kt_wait_awake(atomic_uint *word, unsigned old) {
  if (spin(word, old)) return;
  while (!changed(word, old)) sched_yield();
}

static void sleep_until_changed(atomic_uint *word, unsigned old) {
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
#else
  const struct timespec nap = {0, 100000};
  (void)word, (void)old;
  nanosleep(&nap, NULL);
#endif
}

void kt_wait_asleep(atomic_uint *word, unsigned old, atomic_int *sleepers) {
  if (spin(word, old)) return;
  const int64_t end = nanoseconds() + YIELD_NANOSECONDS;
  do {
    if (changed(word, old)) return;
    sched_yield();
  } while (nanoseconds() < end);
  atomic_fetch_add(sleepers, 1);
  while (!changed(word, old)) sleep_until_changed(word, old);
  atomic_fetch_sub(sleepers, 1);
}

void kt_wait_wake(atomic_uint *word, atomic_int *sleepers) {
  /* Sequentially consistent, as is the increment above: either this sees the sleeper, or the
   * sleeper (the kernel, for a futex) sees the changed word. */
  atomic_thread_fence(memory_order_seq_cst);
  if (atomic_load(sleepers) == 0) return;
#if defined(__linux__)
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
  (void)word;
#endif
}
