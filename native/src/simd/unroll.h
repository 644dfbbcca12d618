/* unroll.h - loops over constants that must disappear, so that arrays become registers; and one
 * function per constant. */
#ifndef KT_UNROLL_H
#define KT_UNROLL_H

#define KT_PRAGMA(words) _Pragma(#words)
#if defined(__clang__)
#define KT_UNROLL(n) KT_PRAGMA(clang loop unroll(full))
#else
#define KT_UNROLL(n) KT_PRAGMA(GCC unroll n)
#endif

/* A loop over a constant that becomes vectors. GCC would unroll it first, and then see none. */
#if defined(__clang__)
#define KT_LOOP
#else
#define KT_LOOP KT_PRAGMA(GCC unroll 1)
#endif

/* Behind each line of an unrolled loop. Else compilers decode or broadcast far ahead, and run out
 * of registers; and they look through all the loads before each load, which takes them long. */
#define KT_IN_ORDER __asm__ volatile("" ::: "memory")

/* M(1, ...) M(2, ...) up to 12: the numbers of tokens of micro kernels. Each becomes a function of
 * its own: one function that holds them all takes compilers twice as long, and is no faster. */
#define KT_1_TO_12(M, ...)                                                                         \
  M(1, __VA_ARGS__)                                                                                \
  M(2, __VA_ARGS__)                                                                                \
  M(3, __VA_ARGS__)                                                                                \
  M(4, __VA_ARGS__)                                                                                \
  M(5, __VA_ARGS__)                                                                                \
  M(6, __VA_ARGS__)                                                                                \
  M(7, __VA_ARGS__)                                                                                \
  M(8, __VA_ARGS__)                                                                                \
  M(9, __VA_ARGS__)                                                                                \
  M(10, __VA_ARGS__)                                                                               \
  M(11, __VA_ARGS__)                                                                               \
  M(12, __VA_ARGS__)
#define KT_NUMBERED(n, name) name##n,
#define KT_NOINLINE static __attribute__((noinline))

#endif
