/* Which NUMA node memory comes from. One system call, so no library for it. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "pool.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MAX_NODES = 1024, WORD_BITS = 8 * sizeof(unsigned long), PREFERRED = 1, MOVE = 2 };

kt_status kt_memory_bind(void *memory, size_t size, int32_t os_node) {
  if (!memory || os_node < 0 || os_node >= MAX_NODES) return KT_ERR_ARGUMENT;
#if defined(__linux__) && defined(SYS_mbind)
  unsigned long mask[MAX_NODES / WORD_BITS] = {0};
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t first = ((uintptr_t)memory + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)memory + size) / page * page;
  mask[(size_t)os_node / WORD_BITS] |= 1ul << ((size_t)os_node % WORD_BITS);
  /* A wish: a kernel without NUMA, or a container that forbids the call, changes no result. */
  if (end > first) syscall(SYS_mbind, first, end - first, PREFERRED, mask, MAX_NODES + 1, MOVE);
#else
  (void)size;
#endif
  return KT_OK;
}
