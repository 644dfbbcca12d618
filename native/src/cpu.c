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
  const uint64_t xcr0 = read_xcr0();
  if ((xcr0 & XCR0_AVX) != XCR0_AVX || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  cpu->avx2 = bit(b, 5);
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

static int level_of_cpu(void) {
  kt_cpu cpu;
  kt_cpu_detect(&cpu);
  if (!cpu.avx512) return KT_ISA_SCALAR;
  const int amx = cpu.amx_tile && cpu.amx_int8 && cpu.amx_bf16 && cpu.amx_permission;
  return amx ? KT_ISA_AMX : KT_ISA_AVX512;
}

/* A level by the name in an environment variable; `otherwise` if it is not set; -1 for a name
 * that is none. */
static int level_named_by(const char *variable, int otherwise) {
  static const char *const names[] = {"scalar", "avx512", "amx"};
  const char *name = getenv(variable);
  if (!name || !*name) return otherwise;
  for (int level = KT_ISA_SCALAR; level <= KT_ISA_AMX; level++)
    if (strcmp(name, names[level]) == 0) return level;
  return -1;
}

/* KTCONV_ASSUME claims a level that the CPU does not report, for instruction emulators. The
 * permission for tile data is asked for all the same; an emulator may be listening. */
static int level_of_machine(void) {
  const int level = level_of_cpu(), assumed = level_named_by("KTCONV_ASSUME", level);
#if KT_X86
  if (assumed == KT_ISA_AMX && level < KT_ISA_AMX) request_amx();
  return assumed > level ? assumed : level;
#else
  (void)assumed;
  return level;
#endif
}

int kt_isa_available(void) {
  static atomic_int cached = -1;
  int level = atomic_load_explicit(&cached, memory_order_relaxed);
  if (level >= 0) return level;
  level = level_of_machine();
  atomic_store_explicit(&cached, level, memory_order_relaxed);
  return level;
}

/* KTCONV_ISA as a level, or minus a kt_status. */
static int wanted_isa(void) {
  const int level = level_named_by("KTCONV_ISA", kt_isa_available());
  if (level_named_by("KTCONV_ASSUME", KT_ISA_SCALAR) < 0) return -KT_ERR_ASSUME_UNKNOWN;
  if (level < 0) return -KT_ERR_ISA_UNKNOWN;
  return level <= kt_isa_available() ? level : -KT_ERR_ISA_MISSING;
}

enum { NOT_READ = -1000 };
static atomic_int active = NOT_READ;

int kt_isa_active(void) {
  int level = atomic_load_explicit(&active, memory_order_relaxed);
  if (level == NOT_READ) {
    level = wanted_isa();
    atomic_store_explicit(&active, level, memory_order_relaxed);
  }
  return level;
}

kt_status kt_isa_use(int isa) {
  if (isa < KT_ISA_SCALAR || isa > KT_ISA_AMX) return KT_ERR_ARGUMENT;
  if (isa > kt_isa_available()) return KT_ERR_ISA_MISSING;
  atomic_store_explicit(&active, isa, memory_order_relaxed);
  return KT_OK;
}

int kt_isa_dispatch(void) {
  const int level = kt_isa_active();
  return level < 0 ? KT_ISA_SCALAR : level;
}
