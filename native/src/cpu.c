/* CPUID, XCR0, the kernel's AMX permission, and the environment. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if KT_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { XCR0_AVX = 0x06, XCR0_AVX512 = 0xe6, XCR0_AMX = 0x60000 };

static uint64_t read_xcr0(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((uint64_t)high << 32) | low;
}

/* Linux grants the 8 KiB of tile data per process, on request. */
static int32_t request_amx(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return 0;
#endif
}

static int32_t bit(uint32_t word, int index) { return (int32_t)((word >> index) & 1); }

void kt_cpu_detect(kt_cpu *cpu) {
  uint32_t a, b, c, d;
  if (!cpu) return;
  memset(cpu, 0, sizeof *cpu);
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return; /* OSXSAVE */
  const int32_t f16c = bit(c, 29), fma = bit(c, 12);
  const uint64_t xcr0 = read_xcr0();
  if ((xcr0 & XCR0_AVX) != XCR0_AVX || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  cpu->avx2 = bit(b, 5) & f16c & fma;
  if ((xcr0 & XCR0_AVX512) == XCR0_AVX512) {
    cpu->avx512 = bit(b, 16) & bit(b, 17) & bit(b, 30) & bit(b, 31); /* F DQ BW VL */
    cpu->avx512_vnni = cpu->avx512 & bit(c, 11);
    cpu->avx512_vbmi = cpu->avx512 & bit(c, 1);
  }
  if ((xcr0 & XCR0_AMX) == XCR0_AMX) {
    cpu->amx_bf16 = bit(d, 22);
    cpu->amx_tile = bit(d, 24);
    cpu->amx_int8 = bit(d, 25);
    cpu->amx_permission = cpu->amx_tile ? request_amx() : 0;
  }
  if (cpu->avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) cpu->avx512_bf16 = bit(a, 5);
}

#else

void kt_cpu_detect(kt_cpu *cpu) {
  if (cpu) memset(cpu, 0, sizeof *cpu);
}

#endif

#if KT_X86
static int has_avx2(const kt_cpu *cpu) { return cpu->avx2; }
static int has_avx512(const kt_cpu *cpu) { return cpu->avx512; }
static int has_vnni(const kt_cpu *cpu) { return cpu->avx512_vnni; }
static int has_bf16(const kt_cpu *cpu) { return cpu->avx512_bf16; }
static int has_vbmi(const kt_cpu *cpu) { return cpu->avx512_vbmi; }

/* Zen 4 and Intel's cores with the same instructions differ in how fast they are: VDPBF16PS does
 * twice as many products as multiply-adds there, half as many here; DRAM wants other orders. */
static int is_amd(void) {
  uint32_t a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
}

/* As every CPU with AMX has, unless a hypervisor hides it. */
static int has_gfni(void) {
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && bit(c, 8);
}

static int has_amx(const kt_cpu *cpu) {
  return cpu->amx_tile && cpu->amx_int8 && cpu->amx_bf16 && cpu->amx_permission && has_gfni();
}
#endif

typedef struct kt_level {
  int isa;
  const char *name;                 /* NULL: part of the named level below it */
  int contains;                     /* the next lower level, -1 below scalar */
  int (*detect)(const kt_cpu *cpu); /* what the level adds to it; NULL: nothing */
  const char *part;                 /* its name as a part, without others of the named level */
  int (*prefer)(void);              /* of a part: whether it is in use unasked; NULL: it is */
} kt_level;

/* The levels of this architecture, each behind the one it contains. */
static const kt_level levels[] = {
    {KT_ISA_SCALAR, "scalar", -1, NULL, NULL, NULL},
#if KT_X86
    {KT_ISA_AVX2, "avx2", KT_ISA_SCALAR, has_avx2, NULL, NULL},
    {KT_ISA_AVX512, "avx512", KT_ISA_AVX2, has_avx512, "avx512-base", NULL},
    {KT_ISA_AVX512_VNNI, NULL, KT_ISA_AVX512, has_vnni, "avx512-vnni", NULL},
    {KT_ISA_AVX512_BF16, NULL, KT_ISA_AVX512_VNNI, has_bf16, "avx512-bf16", NULL},
    {KT_ISA_AVX512_VBMI, NULL, KT_ISA_AVX512_BF16, has_vbmi, "avx512-vbmi", NULL},
    {KT_ISA_AVX512_ZEN, NULL, KT_ISA_AVX512_VBMI, NULL, "avx512-zen", is_amd},
    {KT_ISA_AMX, "amx", KT_ISA_AVX512_VBMI, has_amx, NULL, NULL},
#elif KT_ARM64
    {KT_ISA_NEON, "neon", KT_ISA_SCALAR, NULL, NULL, NULL},
#endif
};

enum { ROWS = sizeof levels / sizeof *levels };

static const kt_level *level_of(int isa) {
  for (int i = 0; i < ROWS; i++)
    if (levels[i].isa == isa) return levels + i;
  return NULL;
}

int kt_isa_at(int index) {
  for (int i = 0; i < ROWS && index >= 0; i++)
    if (levels[i].name && index-- == 0) return levels[i].isa;
  return -1;
}

const char *kt_isa_name(int isa) {
  const kt_level *level = level_of(isa);
  return level ? level->name : NULL;
}

static int called(const char *name, const char *word) { return name && strcmp(name, word) == 0; }

/* A level by its name; a part by its own. -1 for a word that is none. */
static int level_called(const char *word) {
  for (int i = 0; i < ROWS; i++)
    if (called(levels[i].name, word)) return levels[i].isa;
  return -1;
}

static int part_called(const char *word) {
  for (int i = 0; i < ROWS; i++)
    if (called(levels[i].part, word)) return levels[i].isa;
  return -1;
}

/* NULL if it is not set. */
static const char *word_of(const char *variable) {
  const char *const word = getenv(variable);
  return word && *word ? word : NULL;
}

/* The level that KTCONV_ASSUME claims; -1 for a word that is none. */
static int assumed_level(void) {
  const char *const word = word_of("KTCONV_ASSUME");
  return word ? level_called(word) : KT_ISA_SCALAR;
}

/* A set of levels, as bits. */
static int contained(int isa) {
  return isa < 0 ? 0 : 1 << isa | contained(level_of(isa)->contains);
}

/* KTCONV_ASSUME claims a level that the CPU does not report, for instruction emulators. The
 * permission for tile data is asked for all the same; an emulator may be listening. */
static int levels_of_machine(void) {
  const int assumed = contained(assumed_level());
  int found = 0;
  kt_cpu cpu;
  kt_cpu_detect(&cpu);
  for (int i = 0; i < ROWS; i++) {
    const int below = contained(levels[i].contains);
    if ((found & below) == below && (!levels[i].detect || levels[i].detect(&cpu)))
      found |= 1 << levels[i].isa;
  }
#if KT_X86
  if (assumed & ~found & 1 << KT_ISA_AMX) request_amx();
#endif
  return found | assumed;
}

/* Asked once: CPUID takes tens of microseconds in a virtual machine. */
static int available(void) {
  static atomic_int cached = 0;
  int found = atomic_load_explicit(&cached, memory_order_relaxed);
  if (found) return found;
  found = levels_of_machine();
  atomic_store_explicit(&cached, found, memory_order_relaxed);
  return found;
}

int kt_isa_has(int isa) { return kt_isa_name(isa) && (available() >> isa & 1); }

int kt_isa_available(void) {
  int highest = KT_ISA_SCALAR;
  for (int i = 0; i < ROWS; i++)
    if (kt_isa_has(levels[i].isa)) highest = levels[i].isa;
  return highest;
}

/* The named level, with all that the CPU has of it. */
static int whole_level(int isa) {
  for (int i = 0; i < ROWS; i++)
    if (!levels[i].name && levels[i].contains == isa && (available() >> levels[i].isa & 1) &&
        (!levels[i].prefer || levels[i].prefer()))
      isa = levels[i].isa;
  return isa;
}

/* A level or part by its name, or minus a kt_status. */
static int level_for(const char *word) {
  const int level = level_called(word), part = part_called(word);
  if (level >= 0) return kt_isa_has(level) ? whole_level(level) : -KT_ERR_ISA_MISSING;
  if (part < 0) return -KT_ERR_ISA_UNKNOWN;
  return available() >> part & 1 ? part : -KT_ERR_ISA_MISSING;
}

/* KTCONV_ISA as a level, or minus a kt_status. */
static int wanted_isa(void) {
  const char *const word = word_of("KTCONV_ISA");
  if (assumed_level() < 0) return -KT_ERR_ASSUME_UNKNOWN;
  return word ? level_for(word) : whole_level(kt_isa_available());
}

enum { NOT_READ = -1000 };
static atomic_int in_use = NOT_READ; /* a level, named or not, or minus a kt_status */

static int level_in_use(void) {
  int level = atomic_load_explicit(&in_use, memory_order_relaxed);
  if (level == NOT_READ) {
    level = wanted_isa();
    atomic_store_explicit(&in_use, level, memory_order_relaxed);
  }
  return level;
}

/* The level that one without a name is a part of. */
static int named(int level) {
  while (level >= 0 && !kt_isa_name(level)) level = level_of(level)->contains;
  return level;
}

int kt_isa_active(void) { return named(level_in_use()); }

/* level: or minus a kt_status. */
static kt_status use(int level) {
  if (level < 0) return (kt_status)-level;
  atomic_store_explicit(&in_use, level, memory_order_relaxed);
  return KT_OK;
}

kt_status kt_isa_use(int isa) {
  if (isa < 0 || isa >= KT_ISA_COUNT) return KT_ERR_ARGUMENT;
  return use(kt_isa_has(isa) ? whole_level(isa) : -KT_ERR_ISA_MISSING);
}

kt_status kt_isa_use_named(const char *name) {
  return name ? use(level_for(name)) : KT_ERR_ARGUMENT;
}

const char *kt_isa_part(int index) {
  for (int i = 0; i < ROWS && index >= 0; i++)
    if (levels[i].part && (available() >> levels[i].isa & 1) && index-- == 0) return levels[i].part;
  return NULL;
}

/* The level whose cell serves `level`. */
static int serving(int level, const void *row, size_t cell_size) {
  static const char missing[sizeof(void *)] = {0};
  const char *const cells = row;
  while (memcmp(cells + (size_t)level * cell_size, missing, cell_size) == 0)
    level = level_of(level)->contains;
  return level;
}

int kt_isa_cell(const void *row, size_t cell_size) {
  const int level = level_in_use();
  return serving(level < 0 ? KT_ISA_SCALAR : level, row, cell_size);
}

int kt_isa_has_cell(int isa, const void *row, size_t cell_size) {
  return kt_isa_name(isa) && named(serving(whole_level(isa), row, cell_size)) == isa;
}
