/* Files as memory, in which a SIGBUS is no end of the process. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "ktconv.h"

#if defined(__linux__)
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { POPULATE_READ = 22 }; /* of the kernel's mman.h, which not every C library has */

/* Pages that are mapped. The handler reads what other threads write, without a lock. */
typedef struct slot {
  atomic_uintptr_t begin; /* 0: a free slot; 1: one that is being taken */
  atomic_uintptr_t end;
  atomic_int lost;
} slot;

static slot slots[KT_MAPPED_MOST];

/* Slots that were ever taken are the first ones. */
static atomic_int used;

static pthread_mutex_t taking_over = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before; /* whose handler got SIGBUS until ours did */
static atomic_uintptr_t page_size;
static atomic_int handed_on; /* a SIGBUS went to that handler, since ours was there last */

/* Zeros in place of the pages from `address` on; 0: they are not ours. */
static int put_zeros(uintptr_t address) {
  const uintptr_t page = atomic_load(&page_size);
  for (int i = 0; i < atomic_load(&used); i++) {
    const uintptr_t begin = atomic_load(&slots[i].begin), end = atomic_load(&slots[i].end);
    if (begin <= 1 || address < begin || address >= end) continue;
    /* Else `end` is of other pages, for which another thread has just taken this slot. */
    if (atomic_load(&slots[i].begin) != begin) continue;
    const uintptr_t first = address & ~(page - 1);
    atomic_store(&slots[i].lost, 1);
    /* One system call, which a handler may make. */
    return mmap((void *)first, end - first, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
                0) != MAP_FAILED;
  }
  return 0;
}

/* Returning repeats the instruction: with zeros there it goes on, else the SIGBUS comes again and
 * meets the handler before ours, or, where that one hands it back to us, the end of the process. */
static void on_bus_error(int number, siginfo_t *about, void *context) {
  (void)context;
  if (about->si_code > 0 && put_zeros((uintptr_t)about->si_addr)) return;
  struct sigaction end = {.sa_handler = SIG_DFL};
  sigaction(number, atomic_exchange(&handed_on, 1) ? &end : &before, NULL);
  if (about->si_code <= 0) raise(number); /* sent by a process: nothing repeats it */
}

static int take_over(void) {
  struct sigaction now, ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  if (sigaction(SIGBUS, NULL, &now)) return 0;
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) return 1;
  pthread_mutex_lock(&taking_over);
  atomic_store(&page_size, (uintptr_t)sysconf(_SC_PAGESIZE));
  int taken = sigaction(SIGBUS, NULL, &now) == 0;
  if (taken && !((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error)) {
    before = now;
    atomic_store(&handed_on, 0);
    sigemptyset(&ours.sa_mask);
    taken = sigaction(SIGBUS, &ours, NULL) == 0;
  }
  pthread_mutex_unlock(&taking_over);
  return taken;
}

/* A slot for these pages; -1: none is free. */
static int take_slot(uintptr_t begin, uintptr_t end) {
  for (int i = 0; i < KT_MAPPED_MOST; i++) {
    uintptr_t none = 0;
    if (atomic_load(&slots[i].begin) || !atomic_compare_exchange_strong(&slots[i].begin, &none, 1))
      continue;
    atomic_store(&slots[i].end, end);
    atomic_store(&slots[i].lost, 0);
    atomic_store(&slots[i].begin, begin);
    int most = atomic_load(&used);
    while (most <= i && !atomic_compare_exchange_weak(&used, &most, i + 1)) continue;
    return i;
  }
  return -1;
}
#endif

kt_status kt_file_map(int32_t descriptor, int64_t offset, size_t size, kt_mapped *mapped) {
  if (!mapped || descriptor < 0 || offset < 0 || size < 1 || size > SIZE_MAX / 4)
    return KT_ERR_ARGUMENT;
#if defined(__linux__)
  /* What is behind the end in the last page reads as zeros, without a signal. */
  struct stat file;
  if (fstat(descriptor, &file) || !S_ISREG(file.st_mode) || file.st_size < offset ||
      (uint64_t)(file.st_size - offset) < size)
    return KT_ERR_UNSUPPORTED;
  if (!take_over()) return KT_ERR_UNSUPPORTED;
  const size_t before_data = (size_t)offset & (atomic_load(&page_size) - 1);
  const size_t all = before_data + size;
  uint8_t *const pages =
      mmap(NULL, all, PROT_READ, MAP_SHARED, descriptor, (off_t)(offset - (int64_t)before_data));
  if (pages == MAP_FAILED) return KT_ERR_UNSUPPORTED;
  /* Fails where a page cannot be read: no signal then. */
  if (madvise(pages, all, POPULATE_READ) == 0) {
    const int taken = take_slot((uintptr_t)pages, (uintptr_t)pages + all);
    if (taken >= 0) {
      *mapped = (kt_mapped){pages + before_data, pages, all, taken};
      return KT_OK;
    }
  }
  munmap(pages, all);
#endif
  return KT_ERR_UNSUPPORTED;
}

int kt_file_lost(const kt_mapped *mapped) {
#if defined(__linux__)
  return atomic_load(&slots[mapped->slot].lost);
#else
  (void)mapped;
  return 0;
#endif
}

void kt_file_unmap(const kt_mapped *mapped) {
#if defined(__linux__)
  /* First, since the addresses can be those of another mapping at once. */
  atomic_store(&slots[mapped->slot].begin, 1);
  munmap(mapped->pages, mapped->size);
  atomic_store(&slots[mapped->slot].begin, 0);
#else
  (void)mapped;
#endif
}
