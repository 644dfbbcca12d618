/* route.h - the tokens of each expert. */
#ifndef KT_ROUTE_H
#define KT_ROUTE_H

#include "ktconv.h"

/* A slot is one (token, choice) pair whose expert is here. Slots are ordered by expert, then
 * by token: expert active[a] has slots start[a] .. start[a+1]-1. */
typedef struct kt_route {
  int32_t *active; /* [min(experts, slots)] ids of experts with tokens, ascending */
  int32_t *start;  /* [active + 1] */
  int32_t *token;  /* [slots] */
  int32_t *pair;   /* [slots] token * top_k + choice */
  float *weight;   /* [slots] routing weight */
  uint8_t *fresh;  /* [slots] 1: the first of its token */
  uint8_t *used;   /* [tokens] 1: there is a slot */
  int32_t *count;  /* [experts] working memory */
  uint8_t *skip;   /* [experts] not 0: as if no token had chosen it */
  int64_t active_count, slots;
} kt_route;

/* Groups ids [tokens, top_k], of which those beyond the experts, and of experts to be skipped, are
 * left out; the arrays have room. */
void kt_route_group(kt_route *route, const void *ids, int32_t id_size, const float *weights,
                    int64_t tokens, int64_t top_k, int64_t experts);

#endif
