/* Gatherings of threads, and barriers made of them. */
#include "pool.h"

static void init_count(kt_count *count, int32_t all) {
  atomic_init(&count->come, 0);
  count->all = all;
}

void kt_gathering_init(kt_gathering *g, int32_t count) {
  int32_t groups = (count + KT_GROUP_THREADS - 1) / KT_GROUP_THREADS;
  if (groups > KT_MAX_GROUPS) groups = KT_MAX_GROUPS;
  g->size = groups ? (count + groups - 1) / groups : 1;
  groups = (count + g->size - 1) / g->size; /* none of them empty */
  init_count(&g->groups, groups);
  for (int32_t i = 0; i < groups; i++) {
    const int32_t left = count - i * g->size;
    init_count(g->group + i, left < g->size ? left : g->size);
  }
}

/* Whether this thread is the last. It sets the counter back, before anybody can count again. */
static int is_last(kt_count *count) {
  if (atomic_fetch_add_explicit(&count->come, 1, memory_order_acq_rel) + 1 < count->all) return 0;
  atomic_store_explicit(&count->come, 0, memory_order_relaxed);
  return 1;
}

int kt_gathering_come(kt_gathering *g, int64_t thread) {
  if (!is_last(g->group + thread / g->size)) return 0;
  return g->groups.all == 1 || is_last(&g->groups);
}

void kt_barrier_init(kt_barrier *barrier, int32_t count) {
  kt_gathering_init(&barrier->gathering, count);
  kt_turn_init(&barrier->turn);
}

void kt_barrier_wait(kt_barrier *barrier, int64_t thread) {
  const unsigned now = kt_turn_now(&barrier->turn);
  if (kt_gathering_come(&barrier->gathering, thread))
    kt_turn_next(&barrier->turn);
  else
    kt_turn_wait(&barrier->turn, now);
}
