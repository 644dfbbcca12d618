/* CPUID, XCR0, the kernel's AMX permission, and the one getenv. */
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

void kt_cpu_detect(kt_cpu *cpu) { memset(cpu, 0, sizeof *cpu); }

#endif

int kt_isa_available(void) {
  static atomic_int cached = -1;
  int level = atomic_load_explicit(&cached, memory_order_relaxed);
  if (level >= 0) return level;
  kt_cpu cpu;
  kt_cpu_detect(&cpu);
  level = KT_ISA_SCALAR;
  if (cpu.avx512) level = KT_ISA_AVX512;
  if (cpu.avx512 && cpu.amx_tile && cpu.amx_int8 && cpu.amx_bf16 && cpu.amx_permission)
    level = KT_ISA_AMX;
  atomic_store_explicit(&cached, level, memory_order_relaxed);
  return level;
}

/* KTCONV_ISA as a level, or minus a kt_status. */
static int wanted_isa(void) {
  static const char *const names[] = {"scalar", "avx512", "amx"};
  const char *name = getenv("KTCONV_ISA");
  if (!name || !*name) return kt_isa_available();
  for (int level = KT_ISA_SCALAR; level <= KT_ISA_AMX; level++)
    if (strcmp(name, names[level]) == 0)
      return level <= kt_isa_available() ? level : -KT_ERR_ISA_MISSING;
  return -KT_ERR_ISA_UNKNOWN;
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
