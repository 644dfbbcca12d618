/* Where pages lie, and moving them to another NUMA node. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "nodes.h"

#include <errno.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__linux__) && defined(SYS_move_pages)

/* Pages of one system call; bytes that a file is read ahead. */
enum { BATCH = 1024, FLAG_MOVE = 2 };
static const uintptr_t ahead = 8 << 20;

/* Of a range the pages `first` to `end`, as addresses. */
typedef struct span {
  uintptr_t first, end, page;
} span;

typedef struct batch {
  void *at[BATCH];
  int node[BATCH]; /* where each lies, or minus an errno */
  int wanted[BATCH];
  int reason[BATCH]; /* why it was not moved: minus an errno */
} batch;

static span whole_pages(const kt_range *range) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)range->memory;
  const uintptr_t first = (start + page - 1) / page * page;
  const uintptr_t end = (start + range->size) / page * page;
  return (span){first, end > first ? end : first, page};
}

/* The next pages of a span; their number. */
static size_t take(span *s, batch *b) {
  size_t count = 0;
  for (; s->first < s->end && count < BATCH; s->first += s->page) b->at[count++] = (void *)s->first;
  return count;
}

static int ask(batch *b, size_t count) {
  return syscall(SYS_move_pages, 0, count, b->at, NULL, b->node, 0) == 0 ? 0 : errno;
}

kt_status kt_memory_nodes(const kt_range *ranges, int64_t range_count, int64_t *nodes,
                          int32_t count, int64_t *elsewhere) {
  if (!ranges || !nodes || !elsewhere || range_count < 0 || count < 0) return KT_ERR_ARGUMENT;
  batch b;
  *elsewhere = 0;
  for (int32_t n = 0; n < count; n++) nodes[n] = 0;
  for (int64_t i = 0; i < range_count; i++) {
    span s = whole_pages(ranges + i);
    for (size_t pages; (pages = take(&s, &b)) > 0;) {
      if (ask(&b, pages) != 0) return KT_ERR_UNSUPPORTED;
      for (size_t k = 0; k < pages; k++)
        ++*(b.node[k] >= 0 && b.node[k] < count ? nodes + b.node[k] : elsewhere);
    }
  }
  return KT_OK;
}

static void read_pages(const batch *b, size_t count) {
  for (size_t k = 0; k < count; k++) (void)*(const volatile uint8_t *)b->at[k];
}

/* Leaves those that are not on the node, at the front; their number. */
static size_t strays(batch *b, size_t count, int32_t node) {
  size_t left = 0;
  for (size_t k = 0; k < count; k++)
    if (b->node[k] != node) {
      b->at[left] = b->at[k];
      b->reason[left++] = b->reason[k];
    }
  return left;
}

/* Counts those of other processes, for which asking again is no use, and leaves the rest. */
static size_t without_shared(batch *b, size_t count, kt_gathered *g) {
  size_t left = 0;
  for (size_t k = 0; k < count; k++) {
    if (b->reason[k] == -EACCES) {
      g->shared++;
    } else {
      b->at[left] = b->at[k];
      b->reason[left++] = b->reason[k];
    }
  }
  return left;
}

/* Asks the system to move these, `step` pages at a time: at the first page that it cannot move, it
 * may leave the rest of a call alone. Leaves those worth another try; their number. */
static size_t push(batch *b, size_t count, size_t step, int32_t node, kt_gathered *g) {
  read_pages(b, count); /* they may have been given back meanwhile */
  for (size_t k = 0; k < count; k++) b->wanted[k] = node, b->reason[k] = 0;
  for (size_t k = 0; k < count; k += step) {
    const size_t pages = count - k < step ? count - k : step;
    if (syscall(SYS_move_pages, 0, pages, b->at + k, b->wanted + k, b->reason + k, FLAG_MOVE) < 0 &&
        errno != ENOENT) { /* ENOENT: nothing to move, to older kernels */
      g->error = errno;
      return count;
    }
  }
  if ((g->error = ask(b, count)) != 0) return count; /* statuses miss what moved with neighbours */
  return without_shared(b, strays(b, count, node), g);
}

/* A page may be busy for a moment. */
static void gather_batch(batch *b, size_t count, int32_t node, kt_gathered *g) {
  static const size_t steps[] = {BATCH, BATCH, BATCH / 16};
  const int64_t shared = g->shared;
  read_pages(b, count);
  g->pages += (int64_t)count;
  if (g->error || (g->error = ask(b, count)) != 0) return;
  const size_t far = strays(b, count, node);
  size_t left = far;
  for (size_t i = 0; i < sizeof steps / sizeof *steps && left && !g->error; i++)
    left = push(b, left, steps[i], node, g);
  const int64_t lost = (int64_t)left + g->shared - shared;
  g->moved += (int64_t)far - lost;
  g->local += (int64_t)count - lost;
  for (size_t k = 0; k < left && !g->error; k++) ++*(b->reason[k] == -ENOMEM ? &g->full : &g->busy);
}

/* In pieces: of a longer one Linux reads no more than a request to the device has, or its
 * read-ahead. */
static void want(uintptr_t from, uintptr_t size) {
  const uintptr_t most = 512 << 10;
  for (uintptr_t done = 0; done < size; done += most)
    madvise((void *)(from + done), size - done < most ? size - done : most, MADV_WILLNEED);
}

kt_status kt_memory_gather(const kt_range *ranges, int64_t range_count, int32_t os_node,
                           kt_gathered *gathered) {
  if (!ranges || !gathered || range_count < 0 || os_node < 0 || os_node >= KT_MAX_NODES)
    return KT_ERR_ARGUMENT;
  batch b;
  kt_gathered g = {0};
  for (int64_t i = 0; i < range_count; i++) {
    span s = whole_pages(ranges + i);
    uintptr_t asked = s.first;
    while (s.first < s.end) {
      if (asked < s.end && asked < s.first + ahead / 2) { /* only a wish: own memory has no file */
        const uintptr_t size = s.end - asked < ahead ? s.end - asked : ahead;
        want(asked, size);
        asked += size;
      }
      gather_batch(&b, take(&s, &b), os_node, &g);
    }
  }
  *gathered = g;
  return KT_OK;
}

#else

kt_status kt_memory_nodes(const kt_range *ranges, int64_t range_count, int64_t *nodes,
                          int32_t count, int64_t *elsewhere) {
  (void)ranges, (void)range_count, (void)nodes, (void)count, (void)elsewhere;
  return KT_ERR_UNSUPPORTED;
}

kt_status kt_memory_gather(const kt_range *ranges, int64_t range_count, int32_t os_node,
                           kt_gathered *gathered) {
  (void)ranges, (void)range_count, (void)os_node;
  if (!gathered) return KT_ERR_ARGUMENT;
  *gathered = (kt_gathered){.error = ENOSYS};
  return KT_OK;
}

#endif
