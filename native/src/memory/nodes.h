/* nodes.h - sets of NUMA nodes, as the system calls about memory want them. No library: they are
 * few calls, and not every machine has libnuma. */
#ifndef KT_NODES_H
#define KT_NODES_H

#include "ktconv.h"

enum { KT_MAX_NODES = 1024, KT_WORD_BITS = 8 * sizeof(unsigned long) };

typedef struct kt_node_set {
  unsigned long words[KT_MAX_NODES / KT_WORD_BITS];
} kt_node_set;

static inline void kt_add_node(kt_node_set *set, int32_t node) {
  set->words[(size_t)node / KT_WORD_BITS] |= 1ul << ((size_t)node % KT_WORD_BITS);
}

static inline int kt_has_node(const kt_node_set *set, int32_t node) {
  return (int)(set->words[(size_t)node / KT_WORD_BITS] >> ((size_t)node % KT_WORD_BITS) & 1);
}

/* Bits of a set, as the calls count them: one more than there are. */
enum { KT_NODE_SET_BITS = KT_MAX_NODES + 1 };

#endif
