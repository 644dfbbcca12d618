/* cpu.h - the one place that knows what this CPU can do. */
#ifndef KT_CPU_H
#define KT_CPU_H

#include "ktconv.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define KT_X86 1
#else
#define KT_X86 0
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && defined(__GNUC__)
#define KT_ARM64 1
#else
#define KT_ARM64 0
#endif

/* Parts of the level avx512, in use where that is and the CPU has them: what some CPUs have beyond
 * it, last what is best on some. Then the number of all levels and parts: cells of a table's row.
 */
enum {
  KT_ISA_AVX512_VNNI = KT_ISA_COUNT,
  KT_ISA_AVX512_BF16, /* and VNNI */
  KT_ISA_AVX512_VBMI, /* and BF16, VNNI */
  KT_ISA_AVX512_ZEN,  /* the same; for AMD's cores, else only on request */
  KT_LEVELS
};

/* Of a row of pointers to functions or tables, one cell per level, the one that serves the level
 * in use: its own, else that of the next level it contains. The scalar cell must be there. An
 * unusable KTCONV_ISA counts as scalar (kt_isa_active reports it to the caller who asks). */
#define KT_CELL(row) ((row)[kt_isa_cell((row), sizeof *(row))])
int kt_isa_cell(const void *row, size_t cell_size);

/* Whether such a row has a cell for the named level `isa`, with all that this CPU has of it. */
int kt_isa_has_cell(int isa, const void *row, size_t cell_size);

#endif
