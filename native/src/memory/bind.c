/* Which NUMA node memory comes from. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "nodes.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Of the kernel's mempolicy.h and mman.h, which not every C library has as they are now. */
enum { MODE_BIND = 2, MODE_PREFERRED = 1, FLAG_MOVE = 2, MEMS_ALLOWED = 4, POPULATE_WRITE = 23 };
enum { MODE_MASK = 0x0fff, MODE_RELATIVE = 1 << 14 }; /* the rest are flags of a mode */

kt_status kt_memory_bind(void *memory, size_t size, int32_t os_node) {
  if (!memory || os_node < 0 || os_node >= KT_MAX_NODES) return KT_ERR_ARGUMENT;
#if defined(__linux__) && defined(SYS_mbind)
  kt_node_set set = {{0}};
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const uintptr_t first = ((uintptr_t)memory + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)memory + size) / page * page;
  kt_add_node(&set, os_node);
  /* Preferred, not bound: a node without free memory would end the process. */
  if (end <= first || syscall(SYS_mbind, first, end - first, MODE_PREFERRED, set.words,
                              KT_NODE_SET_BITS, FLAG_MOVE) == 0)
    return KT_OK;
#else
  (void)size;
#endif
  return KT_ERR_UNSUPPORTED;
}

kt_status kt_memory_populate(void *memory, size_t size) {
  if (!memory) return KT_ERR_ARGUMENT;
#if defined(__linux__)
  if (size == 0 || madvise(memory, size, POPULATE_WRITE) == 0) return KT_OK;
#else
  (void)size;
#endif
  return KT_ERR_UNSUPPORTED;
}

#if defined(__linux__) && defined(SYS_get_mempolicy)

/* The nodes that a policy of `mode` with the nodes `given` allows in a process whose cpuset has the
 * nodes `group`. Relative ones count the nodes of the cpuset, from the first on again after the
 * last; the system tells them as they were given. */
static kt_node_set allowed_nodes(int mode, const kt_node_set *given, const kt_node_set *group) {
  if ((mode & MODE_MASK) != MODE_BIND) return *group;
  kt_node_set found = {{0}};
  int32_t member[KT_MAX_NODES], members = 0;
  for (int32_t n = 0; n < KT_MAX_NODES; n++)
    if (kt_has_node(group, n)) member[members++] = n;
  for (int32_t n = 0; n < KT_MAX_NODES; n++) {
    if (!kt_has_node(given, n)) continue;
    if (mode & MODE_RELATIVE && members)
      kt_add_node(&found, member[n % members]);
    else if (kt_has_node(group, n))
      kt_add_node(&found, n);
  }
  return found;
}

#endif

kt_status kt_memory_allowed(uint8_t *nodes, int32_t count) {
  if (!nodes || count < 0) return KT_ERR_ARGUMENT;
#if defined(__linux__) && defined(SYS_get_mempolicy)
  kt_node_set of_group = {{0}}, of_process = {{0}};
  int mode = 0;
  const int good =
      syscall(SYS_get_mempolicy, NULL, of_group.words, KT_NODE_SET_BITS, NULL, MEMS_ALLOWED) == 0 &&
      syscall(SYS_get_mempolicy, &mode, of_process.words, KT_NODE_SET_BITS, NULL, 0) == 0;
  if (!good) return KT_ERR_UNSUPPORTED;
  const kt_node_set found = allowed_nodes(mode, &of_process, &of_group);
  for (int32_t n = 0; n < count; n++) nodes[n] = n < KT_MAX_NODES && kt_has_node(&found, n);
  return KT_OK;
#else
  return KT_ERR_UNSUPPORTED;
#endif
}
