/* cpu.h - the one place that knows what this CPU can do. */
#ifndef KT_CPU_H
#define KT_CPU_H

#include "ktconv.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define KT_X86 1
#else
#define KT_X86 0
#endif

/* The level in use, for dispatch: as kt_isa_active(), unusable settings count as scalar
 * (kt_isa_active reports them to the caller who asks). */
int kt_isa_dispatch(void);

#endif
