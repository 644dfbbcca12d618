/* wait.h - waiting for a number in memory to change. */
#ifndef KT_WAIT_H
#define KT_WAIT_H

#include <stdatomic.h>

/* Returns when *word is no longer `old`. Spins, then yields between looks. */
void kt_wait_awake(atomic_uint *word, unsigned old);

/* As above, and sleeps in the end; `sleepers` counts those asleep. Whoever changes *word
 * calls kt_wait_wake() afterwards. */
void kt_wait_asleep(atomic_uint *word, unsigned old, atomic_int *sleepers);
void kt_wait_wake(atomic_uint *word, atomic_int *sleepers);

#endif
