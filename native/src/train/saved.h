/* saved.h - what a forward keeps for its backward. Slots of a batch follow one another from the
 * first pair of the batch on, in the order of its route, which the backward makes again. */
#ifndef KT_SAVED_H
#define KT_SAVED_H

#include "adapter.h"

typedef struct kt_saved {
  uint16_t *inner;   /* [parts][strips of gate, strips of up][pairs][32] before the function, biases
                        added; bf16: what a strip's products leave, and its backward reads, follows
                        one another */
  int8_t *codes;     /* [parts][pairs][w] of the middle, of formats whose products read int8 */
  float *scale;      /* [parts][pairs][groups] of the codes; groups is 0 where there are none */
  float *x_products; /* [pairs][2 rank] A x of gate and up */
  float *products;   /* [parts][pairs][rank] A h of down */
  int64_t pairs, inner_cols, groups;
} kt_saved;

/* Where all of it lies in `memory`, 64-byte aligned; NULL: nowhere. Returns its size in bytes. */
size_t kt_saved_at(const kt_moe *moe, const kt_adapter *adapter, int64_t pairs, void *memory,
                   kt_saved *saved);

/* 32 columns of gate or up from `column` on (% 32 == 0), of a slot that is counted from the call's
 * first pair: those of the next slot are KT_STRIP numbers behind. */
static inline uint16_t *kt_saved_gate(const kt_saved *s, int64_t part, int64_t slot,
                                      int64_t column) {
  const int64_t strip = (part * s->inner_cols + column) / KT_STRIP;
  return s->inner + (strip * s->pairs + slot) * KT_STRIP;
}
static inline uint16_t *kt_saved_up(const kt_saved *s, int64_t part, int64_t slot, int64_t column,
                                    int64_t width) {
  return kt_saved_gate(s, part, slot, s->inner_cols - width + column);
}

/* Rows of a slot. */
static inline int8_t *kt_saved_codes(const kt_saved *s, int64_t part, int64_t slot, int64_t width) {
  return s->codes + (part * s->pairs + slot) * width;
}
static inline float *kt_saved_scale(const kt_saved *s, int64_t part, int64_t slot) {
  return s->scale + (part * s->pairs + slot) * s->groups;
}
static inline float *kt_saved_product(const kt_saved *s, int64_t part, int64_t slot, int64_t rank) {
  return s->products + (part * s->pairs + slot) * rank;
}

#endif
