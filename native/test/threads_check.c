/* threads_check.c - layers and pools used by many threads at once, for ThreadSanitizer.
 *
 *   cc -std=c11 -g -O1 -fsanitize=thread -Inative/include $(find native/src -name '*.c') \
 *      native/test/threads_check.c -lm -pthread && ./a.out
 *
 * Threads call forwards, backwards, adapters and routers on one pool and on several, of more
 * threads than there are CPUs, while other threads create, use and destroy pools of their own, and
 * one does what others have submitted. All results have the bits of a call alone. What is handed
 * over lies in plain memory, so that the sanitizer sees any missing order. An argument leaves forks
 * out, for emulators. Exit code: 0 all passed, 1 something differed, 2 no memory. */
#define _GNU_SOURCE
#include "train_problem.h"

#include <pthread.h>
#include <sys/wait.h>

#define BFLOATS KT_BF16, KT_BF16, KT_BF16, KT_BF16, KT_BF16, 8, 0
#define MIXED KT_F32, KT_F16, KT_F32, KT_F16, KT_F16, 4, 1

static const trial trials[] = {
    {BF16, SILU, 0, 64, 32, 2, 13, 5, FOR_ALL, 0.25f, BFLOATS},
    {INT8, SILU, 1, 64, 64, 1, 33, 16, FOR_ALL, 0, MIXED},
    {INT4, {KT_RELU2, 0, 0, INFINITY}, 0, 128, 128, 2, 5, 4, FOR_DOWN, 0, BFLOATS},
    {GINT4_32, SILU, 0, 64, 64, 3, 9, 0, 0, 0, MIXED},
    {FP8_ROWS, SILU, 0, 64, 64, 1, 7, 8, FOR_UP, 0, BFLOATS},
    {BF16, SILU, 0, 32, 32, 1, 700, 4, FOR_ALL, 0, BFLOATS}, /* several blocks of an expert */
};

enum {
  PROBLEMS = sizeof trials / sizeof *trials,
  POOLS = 3,
  CALLERS = 6,
  CALLS = 10,
  CHURNS = 2,
  ROUTED = 64,
  ROUTER_EXPERTS = 16
};

static problem problems[PROBLEMS];
static result expected[PROBLEMS];
static kt_pool *pools[POOLS];
static float logits[ROUTED * ROUTER_EXPERTS], routed_weights[ROUTED * 2];
static int64_t routed_ids[ROUTED * 2];

/* ---- Adapters at inference ------------------------------------------------------------ */

enum { ADAPTERS = 2, MOST_TOKENS = 700 };

/* Of a problem: all experts have the matrices of their adapter, of another rank in each. */
typedef struct served {
  kt_lora_pair pair[ADAPTERS * EXPERTS * 3];
  int32_t of_token[MOST_TOKENS];
  kt_adapters adapters;
  void *packed[ADAPTERS * 3][2], *expected;
} served;

static served serving[PROBLEMS];

static const void *pack_random(int64_t rows, int64_t cols, void **packed) {
  float *values;
  const void *const matrix = draw_values(KT_F32, rows * cols, 0.125f, &values);
  *packed = malloc(kt_lora_packed_size(rows, cols));
  if (!*packed || kt_lora_pack(KT_F32, matrix, rows, cols, *packed) != KT_OK) exit(2);
  free(values);
  return *packed;
}

static void make_served(const problem *p, served *s) {
  static const int32_t ranks[ADAPTERS] = {16, 5};
  const int gated = kt_function_has_gate(p->moe.activation.function);
  for (int i = 0; i < ADAPTERS * 3; i++) {
    const int64_t rows = i % 3 == 2 ? p->moe.hidden : p->moe.intermediate;
    const int64_t cols = i % 3 == 2 ? p->moe.intermediate : p->moe.hidden, rank = ranks[i / 3];
    const kt_lora_pair pair = {.a = pack_random(rank, cols, &s->packed[i][0]),
                               .b = pack_random(rows, rank, &s->packed[i][1]),
                               .scale = 0.5f,
                               .rank = i % 3 || gated ? (int32_t)rank : 0};
    for (int e = 0; e < EXPERTS; e++) s->pair[(i / 3 * EXPERTS + e) * 3 + i % 3] = pair;
  }
  for (int64_t t = 0; t < p->call.tokens; t++) s->of_token[t] = (int32_t)(t / 3 % 3) - 1;
  s->adapters = (kt_adapters){
      .count = ADAPTERS, .rank = 16, .pair = s->pair, .of_token = s->of_token, .all = -1};
}

static void free_served(const served *s) {
  for (int i = 0; i < ADAPTERS * 3; i++) free(s->packed[i][0]), free(s->packed[i][1]);
}

/* y of a call, in memory that the caller releases. */
static void *serve(int number, kt_pool *pool) {
  const problem *const p = problems + number;
  const kt_adapters *const a = &serving[number].adapters;
  const size_t size = kt_adapted_scratch_size(&p->moe, a, p->call.tokens, TOP_K, pool);
  void *const scratch = memset(guarded(size), 0xff, size), *const y = guarded(y_bytes(p));
  kt_moe_call call = p->call;
  call.y = y;
  if (kt_adapted_forward(&p->moe, a, pool, &call, scratch, size) != KT_OK)
    fail(trials + number, "adapters beside other calls", 1);
  release(scratch, size);
  return y;
}

static void serve_once(int number, kt_pool *pool) {
  const problem *const p = problems + number;
  void *const y = serve(number, pool);
  if (memcmp(y, serving[number].expected, y_bytes(p)))
    fail(trials + number, "adapters beside other calls", 0);
  release(y, y_bytes(p));
}

/* ---- Callers ------------------------------------------------------------------------ */

static void call_layer(int number, kt_pool *pool, const char *who) {
  const problem *const p = problems + number;
  const result r = make_result(p, -1);
  compute(p, pool, &r);
  expect_same(trials + number, p, expected + number, &r, who);
  release_result(p, &r);
}

static kt_status route(kt_pool *pool, int64_t *ids, float *weights) {
  const kt_router router = {.experts = ROUTER_EXPERTS,
                            .top_k = 2,
                            .groups = 1,
                            .keep = 1,
                            .group_score = 1,
                            .renormalise = 1,
                            .jitter = -1.0f,
                            .p_norm = 1.0f,
                            .factor = 1.0f};
  return kt_choose_experts(&router, pool, ROUTED, logits, NULL, ids, weights);
}

static void *call_often(void *argument) {
  const int first = *(const int *)argument;
  int64_t ids[ROUTED * 2];
  float weights[ROUTED * 2];
  for (int i = 0; i < CALLS; i++) {
    kt_pool *const pool = pools[(first + i) % POOLS];
    call_layer((first + i) % PROBLEMS, pool, "beside other calls");
    serve_once((first + i) % PROBLEMS, pool);
    if (route(pool, ids, weights) != KT_OK || memcmp(ids, routed_ids, sizeof ids) ||
        memcmp(weights, routed_weights, sizeof weights))
      fail(trials, "a router beside other calls", 0);
    if (kt_moe_touch(&problems[first % PROBLEMS].moe, pool) != KT_OK ||
        kt_limit_dot(pool, i % 2, 1) != KT_OK || kt_pool_empty(pool, 5) != KT_OK)
      fail(trials, "a job beside other calls", 0);
  }
  return NULL;
}

/* Pools that come and go meanwhile. */
static void *churn(void *argument) {
  const int first = *(const int *)argument;
  for (int i = 0; i < 4 * CALLS; i++) {
    kt_pool *pool = NULL;
    if (kt_pool_create(1 + (first + i) % 4, NULL, NULL, &pool) != KT_OK) exit(2);
    if (i % 8 == 0) call_layer((first + i) % PROBLEMS, pool, "in a pool of its own");
    if (i % 3) kt_pool_empty(pool, 2);
    kt_pool_destroy(pool);
  }
  return NULL;
}

/* ---- Calls in the background --------------------------------------------------------- */

/* A thread that does calls in their order, of arguments that it copies. */
typedef struct background {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int submitted, done; /* problems 0 .. CALLS - 1 of both */
  result results[CALLS];
} background;

static void *do_submitted(void *argument) {
  background *const b = argument;
  for (int i = 0; i < CALLS; i++) {
    pthread_mutex_lock(&b->mutex);
    while (b->submitted <= i) pthread_cond_wait(&b->changed, &b->mutex);
    pthread_mutex_unlock(&b->mutex);
    compute(problems + i % PROBLEMS, pools[i % POOLS], b->results + i);
    pthread_mutex_lock(&b->mutex);
    b->done = i + 1;
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->mutex);
  }
  return NULL;
}

static void check_background(void) {
  static background b = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
  pthread_t thread;
  b.submitted = b.done = 0;
  for (int i = 0; i < CALLS; i++) b.results[i] = make_result(problems + i % PROBLEMS, -1);
  if (pthread_create(&thread, NULL, do_submitted, &b)) exit(2);
  for (int i = 0; i < CALLS; i++) {
    const int number = i % PROBLEMS;
    pthread_mutex_lock(&b.mutex);
    b.submitted = i + 1;
    pthread_cond_broadcast(&b.changed);
    pthread_mutex_unlock(&b.mutex);
    if (i % 2) call_layer((i + 1) % PROBLEMS, pools[(i + 1) % POOLS], "in the foreground");
    pthread_mutex_lock(&b.mutex);
    while (i % 3 == 2 && b.done <= i) pthread_cond_wait(&b.changed, &b.mutex);
    const int done = b.done;
    pthread_mutex_unlock(&b.mutex);
    if (done > i)
      expect_same(trials + number, problems + number, expected + number, b.results + i,
                  "in the background");
  }
  pthread_join(thread, NULL);
  for (int i = 0; i < CALLS; i++) release_result(problems + i % PROBLEMS, b.results + i);
}

/* ---- Forks ----------------------------------------------------------------------------- */

/* A child has none of the threads: its calls are refused, and it can let the pool go. */
static int in_child(void) {
  const problem *const p = problems;
  const result r = make_result(p, -1);
  const room m = make_room(p, pools[1]);
  int64_t ids[ROUTED * 2];
  float weights[ROUTED * 2];
  if (forward(p, pools[1], &m, m.saved, r.y) != KT_ERR_THREADS) return 1;
  if (backward(p, pools[1], &m, &r) != KT_ERR_THREADS) return 2;
  if (route(pools[1], ids, weights) != KT_ERR_THREADS) return 3;
  if (route(NULL, ids, weights) != KT_OK) return 4;
  kt_pool_destroy(pools[1]);
  return 0;
}

static void check_fork(void) {
  int status = -1;
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(in_child());
  }
  waitpid(child, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status)) fail(trials, "a child, at step", status >> 8);
  call_layer(0, pools[1], "after a fork");
}

/* ---- The run ------------------------------------------------------------------------------ */

static void check_level(int forks) {
  static int numbers[CALLERS + CHURNS];
  pthread_t threads[CALLERS + CHURNS];
  for (int i = 0; i < PROBLEMS; i++) {
    compute(problems + i, pools[0], expected + i);
    serving[i].expected = serve(i, pools[0]);
  }
  if (route(NULL, routed_ids, routed_weights) != KT_OK) failures++;
  for (int i = 0; i < CALLERS + CHURNS; i++) {
    numbers[i] = i;
    if (pthread_create(threads + i, NULL, i < CALLERS ? call_often : churn, numbers + i)) exit(2);
  }
  for (int i = 0; i < CALLERS + CHURNS; i++) pthread_join(threads[i], NULL);
  check_background();
  if (forks) check_fork();
  for (int i = 0; i < PROBLEMS; i++) release(serving[i].expected, y_bytes(problems + i));
}

int main(int argc, char **argv) {
  static const int32_t sizes[POOLS] = {1, 3, 16}, nodes[] = {0, 0, 1};
  (void)argv;
  alarm(900); /* a lost wake-up is a failure, not a hang */
  for (int i = 0; i < POOLS; i++)
    if (kt_pool_create(sizes[i], NULL, i == 1 ? nodes : NULL, pools + i) != KT_OK) return 2;
  for (int i = 0; i < PROBLEMS; i++) {
    make_problem(trials + i, problems + i);
    make_served(problems + i, serving + i);
    expected[i] = make_result(problems + i, -1);
  }
  for (int i = 0; i < ROUTED * ROUTER_EXPERTS; i++) logits[i] = 4 * unit();
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    kt_isa_use(kt_isa_at(i));
    check_level(argc < 2);
  }
  for (int i = 0; i < POOLS; i++) kt_pool_destroy(pools[i]);
  for (int i = 0; i < PROBLEMS; i++) free_served(serving + i), free_problem(problems + i);
  printf("threads: %d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
