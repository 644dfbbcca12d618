/* Guided self-scheduling: a run is half of a thread's even part of what is left. */
#include "pool.h"

void kt_share_init(kt_share *share, int64_t items, int64_t grain, int32_t threads) {
  kt_share_init_range(share, 0, items, grain, threads);
}

void kt_share_init_range(kt_share *share, int64_t first, int64_t end, int64_t grain,
                         int32_t threads) {
  atomic_init(&share->next, first);
  share->end = end;
  share->grain = grain < 1 ? 1 : grain;
  share->threads = threads < 1 ? 1 : threads;
}

int kt_share_take(kt_share *share, int64_t *first, int64_t *count) {
  long long next = atomic_load_explicit(&share->next, memory_order_relaxed);
  int64_t length;
  do {
    const int64_t left = share->end - next;
    if (left <= 0) return 0;
    length = left / (2 * share->threads);
    if (length < share->grain) length = share->grain;
    if (length > left) length = left;
  } while (!atomic_compare_exchange_weak_explicit(&share->next, &next, next + length,
                                                  memory_order_relaxed, memory_order_relaxed));
  *first = next;
  *count = length;
  return 1;
}
