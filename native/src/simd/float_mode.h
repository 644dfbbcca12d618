/* float_mode.h - results that do not depend on the caller's floating-point mode.
 *
 * The mode belongs to the thread and is inherited from its creator: any library of the
 * process may have set flush-to-zero or another rounding direction. Entry points that compute
 * with floats do so in the mode of IEEE 754 (to nearest even, denormals kept, no traps), and
 * give the caller's back. What has the bits of AMX's products of bf16 is computed in the mode of
 * these (kt_float_mode_flush), where denormals count as zero, also as results. */
#ifndef KT_FLOAT_MODE_H
#define KT_FLOAT_MODE_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline uint64_t kt_float_mode_enter(void) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80); /* all exceptions masked, nothing else */
  return before;
}

static inline void kt_float_mode_leave(uint64_t before) { _mm_setcsr((unsigned)before); }

static inline uint64_t kt_float_mode_flush(void) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0); /* also: flush to zero, denormals are zero */
  return before;
}

#elif defined(__aarch64__)

static inline uint64_t kt_float_mode_enter(void) {
  uint64_t before;
  const uint64_t ieee = 0;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before)::"memory");
  __asm__ volatile("msr fpcr, %0" ::"r"(ieee) : "memory");
  return before;
}

static inline void kt_float_mode_leave(uint64_t before) {
  __asm__ volatile("msr fpcr, %0" ::"r"(before) : "memory");
}

static inline uint64_t kt_float_mode_flush(void) {
  uint64_t before;
  const uint64_t flush = 1u << 24;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before)::"memory");
  __asm__ volatile("msr fpcr, %0" ::"r"(flush) : "memory");
  return before;
}

#else

static inline uint64_t kt_float_mode_enter(void) { return 0; }
static inline uint64_t kt_float_mode_flush(void) { return 0; }
static inline void kt_float_mode_leave(uint64_t before) { (void)before; }

#endif

#endif
