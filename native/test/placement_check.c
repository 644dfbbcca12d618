/* placement_check.c - which threads read which part's weights, on any machine with two CPUs.
 *
 *   cc -std=c11 -g -O1 -Inative/include $(find native/src -name '*.c') \
 *      native/test/placement_check.c -lm -pthread && ./a.out
 *
 * A pool says that each of its threads, on a CPU of its own, is on another node. Weights are
 * unreadable before each call: the first read of a page faults, and the handler counts it by part
 * and CPU and makes the page readable. All parts' pages are read, each by its team alone, and a
 * call has the same bits on both pools. Scratch, which is read-only before each call, is written
 * by one team in each of its halves, whatever the sizes of calls: only the call itself writes to
 * the first, too. Exit code: 0 all as it should be, 1 something else, 2 no
 * memory. */
#define _GNU_SOURCE
#include "layers.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>

enum { HIDDEN = 256, INNER = 512, EXPERTS = 6, PARTS = 2, TOP_K = 2, MOST = 64, CALLS = 20 };
enum { BLOCK = 4 << 20, SCRATCH = 16 << 20 };

static uint8_t *block[PARTS];
static uint8_t *scratch;
static int cpu_of[PARTS];
static volatile int64_t reads[PARTS][PARTS + 1];  /* by part and team; last: another CPU */
static volatile int64_t writes[PARTS][PARTS + 1]; /* to scratch, by its half and team */
static const uintptr_t books =
    4 * 4096;                   /* not counted: what the caller prepares, first in a half */
static _Thread_local int calls; /* whose thread is the first of team 0 */

static int team_here(void) {
  for (int i = 0; i < PARTS; i++)
    if (sched_getcpu() == cpu_of[i]) return i;
  return PARTS;
}

static void on_read(int signal_number, siginfo_t *info, void *context) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  uint8_t *const at = info->si_addr;
  (void)context;
  for (int part = 0; part < PARTS; part++)
    if (at >= block[part] && at < block[part] + BLOCK) {
      __atomic_fetch_add(&reads[part][team_here()], 1, __ATOMIC_RELAXED);
      if (mprotect((uint8_t *)((uintptr_t)at / page * page), page, PROT_READ) == 0) return;
    }
  if (at >= scratch && at < scratch + SCRATCH) {
    const int half = at >= scratch + SCRATCH / 2;
    if (at >= scratch + half * (SCRATCH / 2) + books)
      __atomic_fetch_add(&writes[half][calls ? 0 : team_here()], 1, __ATOMIC_RELAXED);
    if (mprotect((uint8_t *)((uintptr_t)at / page * page), page, PROT_READ | PROT_WRITE) == 0)
      return;
  }
  signal(signal_number, SIG_DFL);
}

static void hide_weights(void) {
  for (int part = 0; part < PARTS; part++)
    if (mprotect(block[part], BLOCK, PROT_NONE) != 0) exit(2);
}

static const void *moved(uint8_t **to, const void *from, size_t size) {
  memcpy(*to, from, size);
  const void *const here = *to;
  *to += (size + 63) / 64 * 64;
  return here;
}

/* Experts of a part, one behind the other in its block. */
static void make_part(const kt_moe *moe, int part, kt_expert *experts) {
  const size_t wide = kt_packed_size(&moe->layout, INNER / PARTS, HIDDEN);
  const size_t tall = kt_packed_size(&moe->layout, HIDDEN, INNER / PARTS);
  const size_t wide_scale = kt_scale_size(&moe->layout, INNER / PARTS, HIDDEN);
  const size_t tall_scale = kt_scale_size(&moe->layout, HIDDEN, INNER / PARTS);
  uint8_t *to = block[part];
  for (int i = 0; i < EXPERTS; i++) {
    kt_expert *const e = experts + i;
    free_values(make_expert(moe, 0, part, e));
    e->gate = moved(&to, e->gate, wide), e->up = moved(&to, e->up, wide);
    e->down = moved(&to, e->down, tall);
    e->gate_scale = moved(&to, e->gate_scale, wide_scale);
    e->up_scale = moved(&to, e->up_scale, wide_scale);
    e->down_scale = moved(&to, e->down_scale, tall_scale);
  }
  if (to > block[part] + BLOCK) exit(2);
}

static void call(const kt_moe *moe, kt_pool *pool, int64_t tokens, float *y) {
  static float x[MOST * HIDDEN], weights[MOST * TOP_K];
  static int64_t ids[MOST * TOP_K];
  for (int64_t i = 0; i < tokens * HIDDEN; i++) x[i] = unit();
  for (int64_t i = 0; i < tokens * TOP_K; i++) {
    ids[i] = (int64_t)(draw() % EXPERTS);
    weights[i] = unit();
  }
  const kt_moe_call c = {.tokens = tokens,
                         .top_k = TOP_K,
                         .x = x,
                         .ids = ids,
                         .weights = weights,
                         .y = y,
                         .id_size = 8,
                         .x_dtype = KT_F32,
                         .y_dtype = KT_F32};
  failures += kt_moe_forward(moe, pool, &c, scratch, SCRATCH) != KT_OK;
}

/* Two CPUs that this process may use; 0 if there is one only. */
static int find_cpus(void) {
  cpu_set_t set;
  int count = 0;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 0;
  for (int cpu = 0; cpu < CPU_SETSIZE && count < PARTS; cpu++)
    if (CPU_ISSET((size_t)cpu, &set)) cpu_of[count++] = cpu;
  return count == PARTS;
}

static void check(int number, kt_pool *pool, kt_pool *alone) {
  static float y[MOST * HIDDEN], other[MOST * HIDDEN];
  kt_expert experts[PARTS][EXPERTS];
  const kt_moe moe = {.layout = kinds[number].layout,
                      .activation = silu,
                      .hidden = HIDDEN,
                      .intermediate = INNER,
                      .experts = EXPERTS,
                      .parts = PARTS,
                      .expert = experts[0]};
  for (int part = 0; part < PARTS; part++) {
    if (mprotect(block[part], BLOCK, PROT_READ | PROT_WRITE) != 0) exit(2);
    make_part(&moe, part, experts[part]);
  }
  memset((void *)reads, 0, sizeof reads);
  memset((void *)writes, 0, sizeof writes);
  hide_weights();
  if (kt_moe_touch(&moe, pool) != KT_OK) failures++;
  for (int i = 0; i < CALLS; i++) {
    const int64_t tokens = i % 3 == 0 ? 1 : i % 3 == 1 ? 7 : MOST;
    const uint64_t before = state;
    hide_weights();
    if (mprotect(scratch, SCRATCH, PROT_READ) != 0) exit(2);
    call(&moe, pool, tokens, y);
    if (mprotect(scratch, SCRATCH, PROT_READ | PROT_WRITE) != 0) exit(2);
    state = before;
    call(&moe, alone, tokens, other);
    if (memcmp(y, other, (size_t)tokens * HIDDEN * sizeof *y) != 0) {
      failures++;
      printf("%s: other sums with two nodes\n", kinds[number].name);
    }
  }
  for (int part = 0; part < PARTS; part++)
    for (int team = 0; team <= PARTS; team++)
      if ((part == team) != (reads[part][team] > 0)) {
        failures++;
        printf("%s: %lld pages of part %d were read by team %d\n", kinds[number].name,
               (long long)reads[part][team], part, team);
      }
  if (!writes[0][0] || writes[0][1] || writes[1][0] || !writes[1][1]) {
    failures++;
    printf(
        "%s: %lld and %lld pages of the first half of scratch were written by the teams, %lld and "
        "%lld of the second\n",
        kinds[number].name, (long long)writes[0][0], (long long)writes[0][1],
        (long long)writes[1][0], (long long)writes[1][1]);
  }
}

int main(void) {
  const int32_t nodes[PARTS] = {0, 1};
  kt_pool *pool, *alone;
  if (!find_cpus()) {
    printf("placement: skipped, a single CPU: 0 failures\n");
    return 0;
  }
  for (int part = 0; part < PARTS; part++) {
    block[part] = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block[part] == MAP_FAILED) return 2;
  }
  scratch = mmap(NULL, SCRATCH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (scratch == MAP_FAILED) return 2;
  struct sigaction action = {.sa_sigaction = on_read, .sa_flags = SA_SIGINFO};
  if (sigaction(SIGSEGV, &action, NULL) != 0) return 2;
  calls = 1;
  if (kt_pool_create(PARTS, cpu_of, nodes, &pool) != KT_OK) return 2;
  if (kt_pool_create(1, NULL, NULL, &alone) != KT_OK) return 2;
  for (int number = 0; number < KINDS; number++) check(number, pool, alone);
  kt_pool_destroy(pool);
  kt_pool_destroy(alone);
  printf("placement: %d failures\n", failures);
  return failures != 0;
}
