/* random_check.c - random calls of every function of ktconv.h that takes memory.
 *
 *   cc -std=c11 -g -O1 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/random_check.c native/test/amx_emulator.c \
 *      -lm -pthread && ./a.out --rounds 1
 *
 *   --memory heap|end|start  memory of malloc, for the sanitizer; or that ends before, or begins
 *                            behind, an unreadable page, which sees vector and tile loads as well
 *   --rounds N, --seconds S  a round has every subject with every format, dtype and refusal
 *   --seed N                 other numbers
 *   --case N                 one case alone, as a failure names it
 *   --share N                every N-th case only
 *   --list                   the functions
 *
 * Every buffer has just the size that is promised. Valid calls succeed, with the same bits on every
 * level, and on every part of one, where ktconv.h promises it, and near to those of scalar
 * elsewhere; calls that cannot be are refused. At the end the counts of calls: accepted and
 * refused, by function and level; and by layout and level. With the emulator linked in, AMX runs on
 * any x86-64 CPU with AVX-512 BF16. Exit code: 0 all passed, 1 something differed, 2 no memory, 3
 * memory was touched that must not be. */
#define _GNU_SOURCE
#include "random_dense.h"
#include "random_known.h"

#include <time.h>

/* ---- Pools, limits and the CPU -------------------------------------------------------- */

static void add_one(void *count) { ++*(int64_t *)count; }

static void queue_case(int number) {
  kt_queue *queue = NULL;
  kt_task *const task = room(sizeof *task, sizeof(void *));
  int64_t *const runs = room(8, 8), *const counts = room(3 * 8, 8);
  int32_t *const flag = room(4, 4);
  const int64_t times = 1 + below(5);
  *runs = 0, *flag = 0;
  REFUSED_CALL(CALLED(kt_queue_create, NULL));
  EXPECTED(KT_OK, CALLED(kt_queue_create, &queue));
  if (!queue) return;
  *task = (kt_task){.queue = queue, .run = add_one, .context = runs};
  for (int64_t i = 0; i < times; i++) kt_task_start(task);
  if (number % 2)
    kt_queue_drain(queue), kt_task_wait(task);
  else
    kt_task_wait(task), kt_queue_drain(queue);
  counted(OF_kt_task_start, *runs == times);
  counted(OF_kt_task_wait, *runs == times);
  counted(OF_kt_queue_drain, *runs == times);
  kt_task_counts(task, counts, counts + 1, number ? counts + 2 : NULL);
  counted(OF_kt_task_counts,
          counts[0] == times && counts[1] == times && (!number || counts[2] == 1));
  kt_flag_raise(flag);
  counted(OF_kt_flag_raise, *flag == 1);
  kt_queue_destroy(queue);
  kt_queue_destroy(NULL);
  counted(OF_kt_queue_destroy, 1);
}

static void pool_case(int number) {
  int32_t *const cpus = room(16, 4), *const nodes = room(16, 4);
  kt_pool *pool = NULL;
  const int32_t threads = number ? 1 + (int32_t)below(4) : 4097;
  for (int i = 0; i < 4; i++)
    cpus[i] = (int32_t)below(5) - 1, nodes[i] = i ? nodes[i - 1] + (int32_t)below(2) : 0;
  if (number == 2) nodes[0] = 1;
  if (number == 3) cpus[below(threads)] = one_in(2) ? 8192 : INT32_MIN;
  snprintf(inputs, sizeof inputs, "%d threads", threads);
  use_level(0);
  const kt_status status =
      CALLED(kt_pool_create, threads, number == 1 ? NULL : cpus, number == 1 ? NULL : nodes, &pool);
  EXPECTED(number == 0 || number == 2 || number == 3 ? KT_ERR_ARGUMENT : KT_OK, status);
  const int32_t there = status == KT_OK ? threads : 0;
  counted(OF_kt_pool_threads, kt_pool_threads(pool) == there);
  counted(OF_kt_pool_nodes, kt_pool_nodes(pool) <= there);
  EXPECTED(pool ? KT_OK : KT_ERR_ARGUMENT, CALLED(kt_pool_empty, pool, below(20)));
  kt_pool_destroy(pool);
  counted(OF_kt_pool_destroy, 1);
  queue_case(number);
}

static void limits_case(int number) {
  const size_t size = (size_t)(1 + below(3)) << 20;
  const void *const memory = seal(room(size, 1));
  snprintf(inputs, sizeof inputs, "limits %d", number);
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    EXPECTED(KT_OK, CALLED(kt_limit_read, ONE_OF(pools), memory, size, 1 + (int32_t)below(16)));
    EXPECTED(KT_OK, CALLED(kt_limit_dot, ONE_OF(pools), (int)below(2), below(3)));
  }
  REFUSED_CALL(CALLED(kt_limit_read, pools[0], memory, size - 1 - (size_t)below(1000), 1));
  REFUSED_CALL(CALLED(kt_limit_read, pools[0], memory, size, one_in(2) ? 0 : 17));
  REFUSED_CALL(CALLED(kt_limit_read, one_in(2) ? NULL : pools[0], NULL, size, 1));
  REFUSED_CALL(CALLED(kt_limit_dot, pools[0], no_number(), 1));
  REFUSED_CALL(CALLED(kt_limit_dot, pools[0], KT_UNIT_INT8, -1 - below(99)));
}

/* Containers and systems without NUMA refuse any of these. */
#define OR_UNSUPPORTED(call)                                                                       \
  do {                                                                                             \
    const kt_status status_ = (call);                                                              \
    if (status_ != KT_OK && status_ != KT_ERR_UNSUPPORTED) FAILED(#call ": %d", (int)status_);     \
  } while (0)

static void memory_case(int number) {
  enum { SIZE = 3 * 4096, RANGES = 2, NODES = 3 };
  const size_t size = (size_t)below(SIZE + 1);
  uint8_t *const memory = room(SIZE, 1);
  kt_range *const ranges = room(RANGES * sizeof *ranges, sizeof(void *));
  int64_t *const nodes = room(NODES * sizeof *nodes, 8), *const elsewhere = room(8, 8);
  kt_gathered *const gathered = room(sizeof *gathered, 8);
  uint8_t *const allowed = room(NODES, 1);
  const int32_t no_node = one_in(2) ? 1 << 20 : -1 - (int32_t)below(9);
  const int64_t none = -1 - below(9);
  ranges[0] = (kt_range){memory, size}, ranges[1] = (kt_range){memory, 0};
  snprintf(inputs, sizeof inputs, "memory %d, size %zu", number, size);
  OR_UNSUPPORTED(CALLED(kt_memory_bind, memory, number ? size : 0, (int32_t)below(NODES)));
  OR_UNSUPPORTED(CALLED(kt_memory_nodes, ranges, RANGES, nodes, (int32_t)NODES, elsewhere));
  EXPECTED(KT_OK, CALLED(kt_memory_gather, ranges, RANGES, (int32_t)below(NODES), gathered));
  if (gathered->local + gathered->shared + gathered->busy + gathered->full > gathered->pages)
    FAILED("more pages than there are");
  OR_UNSUPPORTED(CALLED(kt_memory_populate, memory, 0));
  OR_UNSUPPORTED(CALLED(kt_memory_allowed, allowed, (int32_t)NODES));
  REFUSED_CALL(CALLED(kt_memory_bind, one_in(2) ? NULL : memory, 4096, no_node));
  REFUSED_CALL(CALLED(kt_memory_nodes, one_in(2) ? NULL : ranges, none, nodes, NODES, elsewhere));
  REFUSED_CALL(CALLED(kt_memory_nodes, ranges, RANGES, one_in(2) ? NULL : nodes, -1, elsewhere));
  REFUSED_CALL(CALLED(kt_memory_nodes, ranges, RANGES, nodes, NODES, NULL));
  REFUSED_CALL(CALLED(kt_memory_gather, one_in(2) ? NULL : ranges, none, 0, gathered));
  REFUSED_CALL(CALLED(kt_memory_gather, ranges, RANGES, no_node, one_in(2) ? NULL : gathered));
  REFUSED_CALL(CALLED(kt_memory_populate, NULL, size));
  REFUSED_CALL(CALLED(kt_memory_allowed, one_in(2) ? NULL : allowed, -1));
}

/* A file of some pages, all of it or a part; then it becomes shorter. */
static void file_case(int number) {
  kt_mapped *const mapped = room(sizeof *mapped, sizeof(void *));
  FILE *const file = tmpfile();
  const int64_t size = 1 + below(5 * 4096), offset = below((int)size);
  const size_t count = (size_t)(1 + below((int)(size - offset)));
  snprintf(inputs, sizeof inputs, "file %d, %zu bytes from %" PRId64 " on", number, count, offset);
  if (!file) return;
  const int descriptor = fileno(file);
  for (int64_t i = 0; i < size; i++) fputc((int)(1 + i % 251), file);
  fflush(file);
  REFUSED_CALL(CALLED(kt_file_map, descriptor, size, 4096 + count, mapped)); /* not all there */
  REFUSED_CALL(CALLED(kt_file_map, descriptor, offset, (size_t)(size - offset) + 1, mapped));
  REFUSED_CALL(CALLED(kt_file_map, one_in(2) ? -1 : descriptor, -1, count, mapped));
  REFUSED_CALL(CALLED(kt_file_map, descriptor, offset, 0, one_in(2) ? NULL : mapped));
  if (CALLED(kt_file_map, descriptor, offset, count, mapped) == KT_OK) {
    for (size_t i = 0; i < count; i++)
      if (mapped->data[i] != 1 + (offset + (int64_t)i) % 251)
        FAILED("another byte than the file's");
    counted(OF_kt_file_lost, kt_file_lost(mapped) == 0);
    if (ftruncate(descriptor, 0) == 0) {
      if (mapped->data[count - 1] != 0) FAILED("a byte that is not there is not 0");
      counted(OF_kt_file_lost, kt_file_lost(mapped) == 1);
    }
    kt_file_unmap(mapped);
    counted(OF_kt_file_unmap, 1);
  }
  fclose(file);
}

static void words_case(int number) {
  static const char *const names[] = {"", "avx", "scalar ", "amx\n", "avx512-", "%s%n", "SCALAR"};
  kt_cpu *const cpu = room(sizeof *cpu, 4);
  char *const name = room(8, 1);
  kt_stored_unit *const unit_of = room(sizeof *unit_of, 4);
  kt_layout *const layout = room(sizeof *layout, 4);
  kt_layout_traits *const traits = room(sizeof *traits, 4);
  *layout =
      one_in(4) ? (kt_layout){no_number(), no_number(), no_number()} : layouts[below(layout_count)];
  strncpy(name, ONE_OF(names), 8);
  name[7] = 0;
  seal(layout), seal(name);
  snprintf(inputs, sizeof inputs, "words %d", number);
  REFUSED_CALL(CALLED(kt_isa_use_named, one_in(4) ? NULL : name));
  kt_cpu_detect(number ? cpu : NULL);
  counted(OF_kt_cpu_detect, !number || (cpu->avx512 & ~1) == 0);
  REFUSED_CALL(CALLED(kt_dtype_unit, one_in(2) ? no_number() : KT_DTYPE_COUNT, unit_of));
  REFUSED_CALL(CALLED(kt_dtype_unit, KT_F32, NULL));
  (void)CALLED(kt_layout_describe, layout, traits);
  REFUSED_CALL(CALLED(kt_layout_describe, NULL, traits));
  const int kernels =
      kt_moe_has_kernels(layout, one_in(2) ? no_number() : (int)below(KT_ISA_COUNT));
  counted(OF_kt_moe_has_kernels, kernels == 0 || kernels == 1);
  const int64_t parts = one_in(3)   ? absurd()
                        : one_in(3) ? huge()
                                    : 1 + below(9),
                part = below(12) - 2;
  const int32_t node = kt_moe_part_node(parts, part, one_in(5) ? NULL : ONE_OF(pools));
  counted(OF_kt_moe_part_node, node >= -1 && node < POOLS);
  if (!kt_strerror((int)draw())) FAILED("a status without a sentence");
}

/* ---- The run ------------------------------------------------------------------------------ */

enum { TWICE = -1 };

typedef struct subject {
  const char *name;
  void (*run)(int number);
  int numbers; /* in a round; 0: as many as layouts, TWICE: twice as many */
} subject;

static const subject subjects[] = {
    {"decode", decode_case, KT_DTYPE_COUNT},
    {"weights", weights_case_of, 0},
    {"encode", encode_case, KT_ENCODE_BF16 + 1},
    {"blocks", blocks_case, 7},
    {"compensate", compensate_case, 2},
    {"forward", forward_case, TWICE},
    {"training", training_case, TWICE},
    {"adapted", adapted_case, TWICE},
    {"router", router_case, 6},
    {"linear layer", linear_case, 6},
    {"norm and rotation", elements_case, 6},
    {"attention", attention_case, 6},
    {"decoder layer", decoder_layer_case, 6},
    {"router and experts", routed_layer_case, 2},
    {"decoder layers", decoder_layers_case, 6},
    {"weights refused", weights_refusal_case, WEIGHTS_REFUSALS},
    {"compensate refused", compensate_refusal_case, 11},
    {"encoded sizes", encoded_sizes_case, 10},
    {"layer refused", layer_refusal_case, LAYER_REFUSALS},
    {"adapted refused", adapted_refusal_case, ADAPTED_REFUSALS},
    {"router refused", router_refusal_case, 20},
    {"outside experts refused", dense_refusal_case, 6},
    {"pools", pool_case, 6},
    {"limits", limits_case, 1},
    {"memory", memory_case, 4},
    {"files", file_case, 8},
    {"words", words_case, 4},
    {"known", known_case, KT_DTYPE_COUNT + 2},
};
enum { SUBJECTS = sizeof subjects / sizeof *subjects };

static int numbers_of(const subject *s) {
  return s->numbers > 0 ? s->numbers : s->numbers == TWICE ? 2 * layout_count : layout_count;
}

static uint64_t cases_of_round(void) {
  int count = 0;
  for (int i = 0; i < SUBJECTS; i++) count += numbers_of(subjects + i);
  return (uint64_t)count;
}

static void run_case(uint64_t number) {
  int rest = (int)(number % cases_of_round());
  const subject *s = subjects;
  for (; rest >= numbers_of(s); s++) rest -= numbers_of(s);
  case_number = number, subject_name = s->name, inputs[0] = 0;
  state = (seed + 1) * 0x9e3779b97f4a7c15u ^ (number + 1) * 0xbf58476d1ce4e5b9u;
  if (!state) state = 1;
  for (int i = 0; i < 8; i++) draw();
  s->run(rest);
  release_rooms(0);
}

/* Another order of each round, so that a share of one has some of every subject. */
static uint64_t scattered(uint64_t n, uint64_t round) {
  const uint64_t step = round % 101 ? 101 : 103; /* primes */
  return n / round * round + n % round * step % round;
}

static void on_fault(int number) {
  const char *const words = where();
  (void)number;
  ssize_t written = write(1, "FAULT in ", 9);
  written += write(1, words, strlen(words));
  written += write(1, "\n", 1);
  _exit(written ? 3 : 2);
}

/* The sanitizers' last words come before ours: AddressSanitizer calls back, the other one aborts.
 */
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

const char *__ubsan_default_options(void);
const char *__ubsan_default_options(void) { return "abort_on_error=1:print_stacktrace=1"; }

static void on_death(void) { printf("DEATH in %s\n", where()), fflush(stdout); }

static void watch(void) {
  signal(SIGABRT, on_fault);
  if (__sanitizer_set_death_callback) {
    __sanitizer_set_death_callback(on_death);
    return;
  }
  signal(SIGSEGV, on_fault), signal(SIGBUS, on_fault), signal(SIGFPE, on_fault);
}

static void print_counts(void) {
  printf("%-24s", "function: accepted+refused");
  for (int i = 0; i < level_count; i++) printf(" %13s", level_names[i]);
  printf("\n");
  for (int f = 0; f < FUNCTIONS; f++) {
    printf("%-26s", function_names[f]);
    for (int i = 0; i < level_count; i++) {
      char cell[64];
      snprintf(cell, sizeof cell, "%" PRIu64 "+%" PRIu64, accepted[f][i], refused[f][i]);
      printf(" %13s", cell);
    }
    printf("\n");
  }
  printf("%-26s", "layout: packed/forward/train");
  printf("\n");
  for (int k = 0; k < layout_count; k++) {
    printf("%-26s", layout_name(layouts + k));
    for (int i = 0; i < level_count; i++) {
      char cell[64];
      snprintf(cell, sizeof cell, "%" PRIu64 "/%" PRIu64 "/%" PRIu64, packings[k][i],
               forwards[k][i], trainings[k][i]);
      printf(" %13s", cell);
    }
    printf("\n");
  }
}

/* After a whole round: every function was called with success, and every kernel and packer ran. */
static void check_coverage(void) {
  subject_name = "coverage", inputs[0] = 0;
  for (int f = 0; f < FUNCTIONS; f++) {
    uint64_t calls = 0;
    for (int i = 0; i < level_count; i++) calls += accepted[f][i];
    if (!calls) FAILED("%s was never called with success", function_names[f]);
  }
  for (int k = 0; k < layout_count; k++)
    for (int i = 0; i < level_count; i++)
      if (!packings[k][i] || !forwards[k][i] || !trainings[k][i])
        FAILED("%s at %s was left out", layout_name(layouts + k), level_names[i]);
}

typedef struct options {
  int64_t rounds, seconds, share, only; /* only: a case, or -1 */
} options;

static int usage(void) {
  printf("usage: random_check [--memory heap|end|start] [--rounds N | --seconds S] [--seed N] "
         "[--case N] [--share N] [--list]\n");
  return 2;
}

static int read_options(int argc, char **argv, options *o) {
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--list") == 0) {
      for (int f = 0; f < FUNCTIONS; f++) printf("%s\n", function_names[f]);
      exit(0);
    }
    if (i + 1 == argc) return 0;
    const char *const name = argv[i++], *const value = argv[i];
    const int64_t count = strtoll(value, NULL, 10);
    if (strcmp(name, "--rounds") == 0)
      o->rounds = count;
    else if (strcmp(name, "--seconds") == 0)
      o->seconds = count;
    else if (strcmp(name, "--seed") == 0)
      seed = (uint64_t)count;
    else if (strcmp(name, "--case") == 0)
      o->only = count;
    else if (strcmp(name, "--share") == 0 && count > 0)
      o->share = count;
    else if (strcmp(name, "--memory") == 0) {
      int found = 0;
      for (int m = HEAP; m <= AT_START; m++)
        if (strcmp(value, memory_names[m]) == 0) mode = (memory_mode)m, found = 1;
      if (!found) return 0;
    } else
      return 0;
  }
  return 1;
}

int main(int argc, char **argv) {
  options o = {.rounds = 1, .share = 1, .only = -1};
  if (!read_options(argc, argv, &o)) return usage();
  assume_amx();
  memory_name = memory_names[mode];
  find_levels(), find_layouts(), make_pools();
  watch();
  const uint64_t round = cases_of_round();
  const time_t end = time(NULL) + (time_t)o.seconds;
  uint64_t cases = 0;
  if (o.only >= 0) run_case((uint64_t)o.only);
  for (uint64_t n = 0;
       o.only < 0 && (o.seconds ? time(NULL) < end : n < (uint64_t)o.rounds * round);
       n += (uint64_t)o.share, cases++)
    run_case(scattered(n, round));
  if (o.share == 1 && cases >= round) check_coverage();
  destroy_pools();
  print_counts();
  printf("%" PRIu64 " cases of seed %" PRIu64 " in memory of %s: %d failures up to level %s\n",
         cases, seed, memory_name, failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
