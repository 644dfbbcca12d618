/* Counting sort of (token, choice) pairs by expert. */
#include "route.h"

#include <string.h>

/* The expert of pair i, or -1 where there is nothing to compute. */
static int64_t expert_at(const kt_route *route, const void *ids, int32_t id_size, int64_t i,
                         int64_t experts) {
  const int64_t id = id_size == 4 ? ((const int32_t *)ids)[i] : ((const int64_t *)ids)[i];
  return id >= 0 && id < experts && !route->skip[id] ? id : -1;
}

/* From counts per expert to the list of active ones and where their slots start; count[e]
 * becomes the next free slot of expert e. */
static void place_experts(kt_route *route, int64_t experts) {
  int32_t slot = 0, active = 0;
  for (int64_t e = 0; e < experts; e++) {
    const int32_t here = route->count[e];
    route->count[e] = slot;
    if (!here) continue;
    route->active[active] = (int32_t)e;
    route->start[active++] = slot;
    slot += here;
  }
  route->start[active] = slot;
  route->active_count = active;
  route->slots = slot;
}

static void mark_first(kt_route *route, int64_t tokens) {
  memset(route->used, 0, (size_t)tokens);
  for (int64_t slot = 0; slot < route->slots; slot++) {
    uint8_t *const used = route->used + route->token[slot];
    route->fresh[slot] = !*used;
    *used = 1;
  }
}

void kt_route_group(kt_route *route, const void *ids, int32_t id_size, const float *weights,
                    int64_t tokens, int64_t top_k, int64_t experts) {
  memset(route->count, 0, (size_t)experts * sizeof *route->count);
  for (int64_t i = 0; i < tokens * top_k; i++) {
    const int64_t id = expert_at(route, ids, id_size, i, experts);
    if (id >= 0) route->count[id]++;
  }
  place_experts(route, experts);
  for (int64_t i = 0; i < tokens * top_k; i++) {
    const int64_t id = expert_at(route, ids, id_size, i, experts);
    if (id < 0) continue;
    const int32_t slot = route->count[id]++;
    route->token[slot] = (int32_t)(i / top_k);
    route->pair[slot] = (int32_t)i;
    route->weight[slot] = weights[i];
  }
  mark_first(route, tokens);
}
