/* ktconv_base.h - statuses, and the levels of instruction sets. Part of ktconv.h. */
#ifndef KTCONV_BASE_H
#define KTCONV_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cffi reads the text between the two markers. */
/* --- begin cffi --- */

typedef enum kt_status {
  KT_OK = 0,
  KT_ERR_ARGUMENT = 1,        /* null pointer, size below 1, unknown dtype or format */
  KT_ERR_SHAPE = 2,           /* rows or cols not a multiple of what format or dtype need, or more
                                 than memory can hold */
  KT_ERR_STRIDE = 3,          /* neither stride of the matrix is 1 */
  KT_ERR_SCALE = 4,           /* a dtype without the scales it needs, or a grid that is none */
  KT_ERR_SCRATCH = 5,         /* scratch smaller than kt_scratch_size(cols) */
  KT_ERR_NONFINITE = 6,       /* a NaN or Inf in the matrix; see kt_position */
  KT_ERR_ISA_UNKNOWN = 7,     /* KTCONV_ISA has a name that is no level */
  KT_ERR_ISA_MISSING = 8,     /* this machine does not have that level */
  KT_ERR_EXPERT = 9,          /* a token goes to an expert that has no weights here */
  KT_ERR_THREADS = 10,        /* threads cannot be created, or belong to another process */
  KT_ERR_ASSUME_UNKNOWN = 11, /* KTCONV_ASSUME has a name that is no level */
  KT_ERR_UNSUPPORTED = 12     /* the function does not do this layout */
} kt_status;

/* One static sentence for a status; never NULL. */
const char *kt_strerror(int status);

/* ---- CPU ---------------------------------------------------------------- */

/* Levels are bundles of instruction sets. The numbers have no order: kt_isa_at() lists the
 * levels of this architecture, each behind those that it contains. */
typedef enum kt_isa {
  KT_ISA_SCALAR = 0, /* portable C */
  KT_ISA_AVX512 = 1, /* x86-64: AVX-512 F, BW, DQ, VL, saved by the OS; contains avx2 */
  KT_ISA_AMX = 2,    /* x86-64: AMX tile, int8, bf16, granted by the OS, and GFNI; contains avx512
                        with VNNI, BF16 and VBMI */
  KT_ISA_AVX2 = 3,   /* x86-64: AVX2, F16C and FMA, saved by the OS; contains scalar */
  KT_ISA_NEON = 4,   /* aarch64: NEON, which all of them have; contains scalar */
  KT_ISA_COUNT
} kt_isa;

/* The levels of this architecture, lowest first; -1 for an index beyond the last. */
int kt_isa_at(int index);

/* "avx512", as KTCONV_ISA names it; NULL for a number that is no level of this architecture. */
const char *kt_isa_name(int isa);

/* Whether this machine has the level, whatever KTCONV_ISA says. */
int kt_isa_has(int isa);

/* What the CPU and the OS report, each 0 or 1. On other architectures all 0. */
typedef struct kt_cpu {
  int32_t avx2; /* and F16C and FMA, which all but the oldest have beside it */
  int32_t avx512, avx512_vnni, avx512_bf16, avx512_vbmi;
  int32_t amx_tile, amx_int8, amx_bf16;
  int32_t amx_permission; /* the kernel grants tile state to this process */
} kt_cpu;

void kt_cpu_detect(kt_cpu *cpu); /* NULL is fine */

/* The highest level this machine has, whatever KTCONV_ISA says. KTCONV_ASSUME=amx (or another
 * level; read once) claims what the CPU does not report, for runs under an instruction
 * emulator; without one the process ends with SIGILL. */
int kt_isa_available(void);

/* The level in use: KTCONV_ISA if set (read once), else the highest available.
 * Returns a kt_isa, or minus a kt_status when KTCONV_ISA is unusable. */
int kt_isa_active(void);

/* Use `isa` from now on in this process, for tests and benchmarks. Not to be
 * called while other threads compute. KT_ERR_ISA_MISSING if not available. */
kt_status kt_isa_use(int isa);

/* The same for a level, or part of one, by its name. KT_ERR_ISA_UNKNOWN for a name that is none. */
kt_status kt_isa_use_named(const char *name);

/* Parts of levels that this machine has, lowest first; NULL beyond the last. KTCONV_ISA and
 * kt_isa_use_named take their names, too: "avx512-base" is AVX-512 as in Skylake-X, "avx512-vnni"
 * as in Cascade Lake, "avx512-bf16" as in Cooper Lake, "avx512-vbmi" as in Sapphire Rapids,
 * "avx512-zen" what is in use on AMD's cores. */
const char *kt_isa_part(int index);

/* --- end cffi --- */

#ifdef __cplusplus
}
#endif
#endif
