/* beside.h - what a thread does beside the products of a strip, within their loops: it fetches the
 * weights that come next into the caches, and works on the sums of the strip before. A kernel that
 * leaves room for it calls kt_beside_step in each step; others take no notice.
 *
 * Prefetching goes round several pages: what is to come is cut into PARTS equal parts, and each
 * time one line of each part is fetched. Line after line of one page holds the fill buffers for as
 * long as DRAM takes, while loads from L2 wait for them (INT8, 64 tokens, K = 2048, one core of a
 * Xeon with AMX, nanoseconds for four tile products: not at all 108, line after line 88, in turn
 * 73). */
#ifndef KT_BESIDE_H
#define KT_BESIDE_H

#include "gemm.h"

enum {
  KT_BESIDE_PARTS = 8,
  KT_BESIDE_REGIONS = 12, /* runs of bytes that are fetched one after the other */
  KT_BESIDE_LINE = 64,
  KT_BESIDE_ONE = 256,       /* a whole unit of what is counted in fractions */
  KT_BESIDE_SOME = 4,        /* units of work that are done at once, or more */
  KT_BESIDE_RING = 2 * 8192, /* bytes */
  KT_BESIDE_SPARE = 2 * 4096 /* bytes */
};

/* Units first .. end of some work. */
typedef void kt_beside_fn(void *context, int64_t first, int64_t end);

typedef struct kt_beside {
  /* Fetching: `lines` of each part are left, from `at` on; then the other regions. */
  const uint8_t *at;
  int64_t apart, lines;
  kt_region region[KT_BESIDE_REGIONS];
  int64_t next_region, regions, products; /* products among which all of it is shared out */
  uint32_t line_rate, line_part;
  /* Work: units next .. end are left. */
  kt_beside_fn *work;
  void *context;
  int64_t next, end, work_products;
  uint32_t work_rate, work_part;
  /* The product that comes next, of which a kernel may unpack the beginning; NULL: not known. */
  const kt_weight *following;
  int64_t following_strip;
  /* A kernel's own, which lives from one product to the next: two slots of unpacked weights, of
   * which `slot` holds ready_steps steps of those at `ready`; what the tiles are configured for, 0
   * if nothing; how they are given back. */
  uint8_t *ring, *spare;
  const uint8_t *ready;
  int32_t slot, ready_steps, rows, line;
  int32_t backward; /* whether the next strip begins with the last tokens, which are still in L1 */
  void (*leave)(void);
} kt_beside;

/* Nothing to do; 64-byte aligned memory of RING and SPARE bytes. */
static inline kt_beside kt_beside_of(uint8_t *ring, uint8_t *spare) {
  return (kt_beside){.ring = ring, .spare = spare};
}

static inline __attribute__((always_inline)) void kt_beside_touch(const uint8_t *at) {
#if defined(__x86_64__)
  /* GCC 12 deletes calls of functions that only prefetch. To L2. */
  __asm__ volatile("prefetcht1 %0" ::"m"(*at));
#else
  __builtin_prefetch(at, 0, 2);
#endif
}

/* Small ones at once. */
static inline void kt_beside_next_region(kt_beside *b) {
  enum { WHOLE = KT_BESIDE_PARTS * KT_BESIDE_LINE };
  b->lines = 0;
  while (b->lines == 0 && b->next_region < b->regions) {
    const kt_region r = b->region[b->next_region++];
    b->at = r.from;
    b->lines = r.size / WHOLE;
    b->apart = b->lines * KT_BESIDE_LINE;
    for (int64_t i = 0; b->lines == 0 && i < r.size; i += KT_BESIDE_LINE)
      kt_beside_touch(r.from + i);
  }
}

/* Fetches `regions` of b->region beside the next `products`. */
static inline void kt_beside_fetch(kt_beside *b, int64_t regions, int64_t products) {
  b->next_region = 0, b->regions = regions, b->products = products;
  kt_beside_next_region(b);
}

static inline void kt_beside_finish(kt_beside *b) {
  if (b->next < b->end) b->work(b->context, b->next, b->end);
  b->next = b->end;
}

/* Does `units` of work beside the next `products`; what is left of other work at once. */
static inline void kt_beside_work(kt_beside *b, kt_beside_fn *work, void *context, int64_t units,
                                  int64_t products) {
  kt_beside_finish(b);
  b->work = work, b->context = context, b->next = 0, b->end = units, b->work_products = products;
}

/* Gives tiles back, which others may configure then; nothing is ready any more. */
static inline void kt_beside_leave(kt_beside *b) {
  if (b->leave) b->leave();
  b->leave = NULL, b->rows = b->line = 0, b->ready = NULL;
}

/* A product of so many steps begins: work ends with it, fetching a little before the products that
 * it is shared out among. */
static inline void kt_beside_start(kt_beside *b, int64_t steps) {
  int64_t lines = b->lines;
  for (int64_t i = b->next_region; i < b->regions; i++)
    lines += b->region[i].size / (KT_BESIDE_PARTS * KT_BESIDE_LINE);
  const int64_t all = steps * (b->products > 1 ? b->products : 1);
  b->line_rate = (uint32_t)(lines * (KT_BESIDE_ONE + KT_BESIDE_ONE / 16) / all) + 1;
  const int64_t working = steps * (b->work_products > 1 ? b->work_products : 1);
  b->work_rate = (uint32_t)((b->end - b->next) * KT_BESIDE_ONE / working) + 8;
  if (b->products) b->products--;
  if (b->work_products) b->work_products--;
}

/* A step that only fetches: for kernels whose sums would have to leave their registers for work. */
static inline __attribute__((always_inline)) void kt_beside_fetch_step(kt_beside *b) {
  b->line_part += b->line_rate;
  for (; b->line_part >= KT_BESIDE_ONE && b->lines; b->line_part -= KT_BESIDE_ONE) {
    const uint8_t *at = b->at;
    const int64_t apart = b->apart;
    kt_beside_touch(at);
    kt_beside_touch(at + apart);
    kt_beside_touch(at + 2 * apart);
    kt_beside_touch(at + 3 * apart);
    at += 4 * apart;
    kt_beside_touch(at);
    kt_beside_touch(at + apart);
    kt_beside_touch(at + 2 * apart);
    kt_beside_touch(at + 3 * apart);
    b->at += KT_BESIDE_LINE;
    if (--b->lines == 0) kt_beside_next_region(b);
  }
  b->line_part %= KT_BESIDE_ONE;
}

static inline __attribute__((always_inline)) void kt_beside_step(kt_beside *b) {
  kt_beside_fetch_step(b);
  const int64_t left = b->end - b->next, due = (b->work_part += b->work_rate) / KT_BESIDE_ONE;
  if (left == 0) {
    b->work_part = 0;
  } else if (due >= KT_BESIDE_SOME || due >= left) {
    const int64_t end = b->next + (due < left ? due : left);
    b->work_part %= KT_BESIDE_ONE;
    b->work(b->context, b->next, end);
    b->next = end;
  }
}

#endif
