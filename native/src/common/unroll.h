/* unroll.h - loops over constants that must disappear, so that arrays become registers. */
#ifndef KT_UNROLL_H
#define KT_UNROLL_H

#define KT_PRAGMA(words) _Pragma(#words)
#if defined(__clang__)
#define KT_UNROLL(n) KT_PRAGMA(clang loop unroll(full))
#else
#define KT_UNROLL(n) KT_PRAGMA(GCC unroll n)
#endif

#endif
