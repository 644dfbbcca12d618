/* turn.h - a number that counts up, and waiting until it has. */
#ifndef KT_TURN_H
#define KT_TURN_H

#include <stdatomic.h>
#include <stdint.h>

/* Twice the number; odd while a thread sleeps. One word, so that whoever counts it up learns of
 * sleepers by the same operation and touches the memory no more: it may be gone by then. */
typedef atomic_uint kt_turn;

static inline void kt_turn_init(kt_turn *turn) { atomic_init(turn, 0); }

static inline unsigned kt_turn_now(kt_turn *turn) {
  return atomic_load_explicit(turn, memory_order_acquire) & ~1u;
}

/* Returns once the turn is no longer `now`, 1 if that took longer than threads stay awake. What
 * happened before the turn is visible then. */
int kt_turn_wait(kt_turn *turn, unsigned now);

/* Counts up, by one thread at a time, and wakes who sleeps. */
void kt_turn_next(kt_turn *turn);

/* Of a clock that no one sets. */
int64_t kt_nanoseconds(void);

#endif
