/* train_check.c - fine-tuning of whole layers of every kernel on every level, without Python.
 *
 *   cc -std=c11 -g -O0 -fsanitize=address,undefined -Inative/include \
 *      $(find native/src -name '*.c') native/test/train_check.c native/test/amx_emulator.c \
 *      -lm -pthread && ./a.out
 *
 * All memory ends at unreadable pages. All levels are compared with plain loops in double precision
 * (train_truth.h), and with scalar, within bounds; results for several numbers of threads
 * bit by bit. Which elements dropout drops is read off gradients of A, of one choice at a time.
 * With the emulator linked in, AMX runs on any x86-64 CPU with AVX-512 BF16. Exit code: 0 all
 * passed, 1 something differed, 2 no memory. */
#define _GNU_SOURCE
#include "train_problem.h"

/* How far from right: a row of y or of a gradient of matrices, a row of dx, a number of dweights,
 * in lengths of them. */
typedef struct bounds {
  double rows, dx, single;
} bounds;

/* Activations and their gradients are rounded to bf16 a few times on their way, and to codes. Over
 * 6 draws of INT8, INT4 and BF16 with 100 to 300 tokens the worst row of y was 0.0114 of its length
 * from the truth, of matrices' gradients 0.0047, the worst number of dweights 0.042, on all levels.
 * Of dx it was 0.0111 (0.0167 of 700 tokens) where scales are folded into gradients and rounded
 * again, but 0.0059 with AMX, which leaves that rounding out (split rows). The two errors of dx
 * have little in common, so levels differ by the root of the sum of their squares, up to 0.0177;
 * of what is rounded alike, by sums in other orders: 0.0041, and 0.0111 of a number. Where AMX
 * reads bf16 next to integers in groups, activations are other numbers, as far from one another as
 * both may be from the truth. */
static const bounds of_truth = {0.012, 0.02, 0.05}, of_levels = {0.008, 0.02, 0.016},
                    of_rounded = {0.017, 0.02, 0.07};

enum { POOLS = 3 };

/* dtypes of LoRA, x, y, dy, dx; bytes of an id; whether an expert is skipped */
#define BFLOATS KT_BF16, KT_BF16, KT_BF16, KT_BF16, KT_BF16, 8, 0
#define FLOATS KT_F32, KT_F32, KT_F32, KT_F32, KT_F32, 4, 1
#define MIXED KT_BF16, KT_F16, KT_F32, KT_F16, KT_F16, 4, 1
#define OTHERS KT_F32, KT_BF16, KT_F16, KT_F32, KT_BF16, 8, 1

/* Where LoRA moves what a limit cuts, an element that comes to lie on the other side has another
 * derivative: limits are for layers in which few elements are near. */
static const trial trials[] = {
    {BF16, SILU, 0, 96, 32, 1, 13, 5, FOR_ALL, 0, FLOATS},
    {BF16, SILU, 0, 32, 96, 3, 5, 33, FOR_ALL, 0.25f, BFLOATS},
    {BF16, SILU, 0, 64, 64, 1, 100, 16, FOR_ALL, 0, OTHERS},
    {BF16, SILU, 0, 288, 32, 1, 3, 64, FOR_ALL, 0.25f, FLOATS},
    {BF16, {KT_RELU2, 0, 0, 2.0f}, 1, 64, 32, 2, 9, 1, FOR_UP | FOR_DOWN, 0, MIXED},
    {BF16, {KT_SWIGLU, 1.702f, 1.0f, 0.5f}, 1, 64, 96, 1, 7, 64, FOR_DOWN, 0, OTHERS},
    {BF16, {KT_SWIGLU_CLAMPED, 0, 0, 0.25f}, 1, 32, 64, 2, 6, 16, FOR_DOWN, 0.5f, FLOATS},
    {BF16, {KT_RELU, 0, 0, 0.5f}, 1, 64, 32, 1, 13, 16, FOR_DOWN, 0, BFLOATS},
    {BF16, {KT_GELU, 0, 0, 1.0f}, 0, 64, 32, 1, 33, 5, FOR_GATE, 0, MIXED},
    {INT8, SILU, 0, 128, 64, 1, 33, 16, FOR_ALL, 0, BFLOATS},
    {INT8, {KT_GELU_TANH, 0, 0, INFINITY}, 1, 64, 64, 3, 5, 5, FOR_UP, 0.25f, FLOATS},
    {INT8, {KT_UNGATED_GELU, 0, 0, 4.0f}, 1, 64, 128, 2, 13, 33, FOR_DOWN, 0, MIXED},
    {INT4, SILU, 0, 128, 128, 1, 5, 64, FOR_ALL, 0, FLOATS},
    {INT4, {KT_RELU2, 0, 0, INFINITY}, 1, 128, 128, 2, 13, 1, FOR_UP | FOR_DOWN, 0, OTHERS},
    {FP8, SILU, 0, 128, 128, 2, 5, 16, FOR_ALL, 0, MIXED},
    {FP8_ROWS, {KT_GELU, 0, 0, INFINITY}, 1, 128, 64, 1, 13, 33, FOR_ALL, 0, BFLOATS},
    {MXFP4, SILU, 0, 64, 96, 2, 13, 16, FOR_GATE | FOR_UP, 0, OTHERS},
    {MXFP4, {KT_SOFTCAP, 0.5f, 2.0f, INFINITY}, 1, 96, 64, 1, 1, 5, FOR_ALL, 0, FLOATS},
    {NVFP4, SILU, 0, 64, 96, 2, 13, 16, FOR_ALL, 0, OTHERS},
    {MXFP8, {KT_SWIGLU, 1.702f, 1.0f, 7.0f}, 1, 64, 96, 2, 35, 16, FOR_ALL, 0, OTHERS},
    {MXFP8, {KT_SWIGLU_CLAMPED, 0, 0, 0.25f}, 0, 96, 32, 1, 5, 5, FOR_UP, 0.25f, FLOATS},
    {GINT4_32, SILU, 0, 64, 96, 3, 13, 16, FOR_ALL, 0.25f, FLOATS},
    {GINT4_32, {KT_UNGATED_GELU_TANH, 0, 0, INFINITY}, 0, 96, 32, 1, 5, 1, FOR_UP, 0, MIXED},
    {GINT4_128, SILU, 0, 128, 128, 1, 35, 33, FOR_DOWN, 0, BFLOATS},
    {GINT4_128, {KT_SWIGLU, 1.702f, 1.0f, 7.0f}, 1, 256, 128, 2, 3, 0, 0, 0, OTHERS},
    {GINT4_32, SILU, 0, 160, 96, 1, 100, 16, FOR_ALL, 0, BFLOATS}, /* in bf16, where AMX does */
    {GINT8_64, SILU, 0, 192, 128, 2, 70, 5, FOR_ALL, 0, OTHERS},
    {GINT8_64, {KT_GELU, 0, 0, INFINITY}, 1, 64, 64, 1, 3, 33, FOR_DOWN, 0, MIXED},
    {INT8, SILU, 0, 128, 64, 1, 300, 0, 0, 0, BFLOATS}, /* several blocks of an expert */
    /* Sums in parts, through down, and through gate and up; of more strips than fit together. */
    {INT8, SILU, 0, 2112, 576, 1, 5, 5, FOR_ALL, 0, BFLOATS},
    {INT8, SILU, 0, 576, 1088, 1, 5, 5, FOR_ALL, 0, BFLOATS},
    {BF16, SILU, 0, 2080, 64, 1, 19, 5, FOR_ALL, 0, FLOATS},
    {BF16, SILU, 0, 32, 1056, 1, 19, 5, FOR_ALL, 0, FLOATS},
    {BF16, SILU, 0, 64, 64, 1, 300, 5, FOR_ALL, 0, BFLOATS},
    {INT8, SILU, 0, 64, 64, 1, 700, 5, FOR_ALL, 0, BFLOATS}, /* streamed in several, too */
    {BF16, SILU, 0, 384, 64, 1, 40, 40, FOR_ALL, 0,
     BFLOATS},                                              /* a block of 48 ranks x 320 columns */
    {BF16, SILU, 0, 64, 32, 2, 9, 72, FOR_ALL, 0, BFLOATS}, /* ranks in two blocks */
};

/* ---- Comparing ----------------------------------------------------------------------- */

/* The largest distance of a row from its truth, in lengths of that row or of the mean one, if that
 * is longer: sums may cancel. Rows of zeros must be zeros. */
static double distance(int dtype, const void *found, const double *truth, int64_t rows,
                       int64_t cols) {
  double all = 0, worst = 0;
  for (int64_t i = 0; i < rows * cols; i++) all += truth[i] * truth[i];
  for (int64_t r = 0; r < rows; r++) {
    double squares = 0, size = 0;
    for (int64_t i = r * cols; i < (r + 1) * cols; i++) {
      squares += pow((double)value_at(dtype, found, i) - truth[i], 2);
      size += truth[i] * truth[i];
    }
    if (squares == 0.0) continue;
    const double unit_size = fmax(size, size > 0.0 ? all / (double)rows : 0.0);
    const double error = sqrt(squares / unit_size);
    if (isnan(error)) return error;
    worst = fmax(worst, error);
  }
  return worst;
}

static double distance_of(const problem *p, const result *r, int which, const double *truth) {
  const int64_t count = count_of(p, which);
  const int64_t rows = which == DX ? p->call.tokens : which == DWEIGHTS ? count : EXPERTS;
  return distance(dtype_of(p, which), r->gradient[which], truth, rows, count / rows);
}

/* y and gradients as numbers. */
typedef struct numbers {
  double *y, *gradient[GRADIENTS];
} numbers;

static numbers make_numbers(const problem *p) {
  numbers n = {.y = zeros(p->call.tokens * p->moe.hidden)};
  for (int which = 0; which < GRADIENTS; which++) n.gradient[which] = zeros(count_of(p, which));
  return n;
}

static void free_numbers(const numbers *n) {
  free(n->y);
  for (int which = 0; which < GRADIENTS; which++) free(n->gradient[which]);
}

static void numbers_of(const problem *p, const result *r, const numbers *n) {
  for (int64_t i = 0; i < p->call.tokens * p->moe.hidden; i++)
    n->y[i] = (double)value_at(p->call.y_dtype, r->y, i);
  for (int which = 0; which < GRADIENTS; which++)
    for (int64_t i = 0; r->gradient[which] && i < count_of(p, which); i++)
      n->gradient[which][i] = (double)value_at(dtype_of(p, which), r->gradient[which], i);
}

static void expect_near(const trial *t, const problem *p, const result *r, const numbers *right,
                        const bounds *most) {
  const double error = distance(p->call.y_dtype, r->y, right->y, t->tokens, t->hidden);
  if (!(error <= most->rows)) fail(t, "y", error);
  for (int which = 0; which < GRADIENTS; which++) {
    if (!r->gradient[which]) continue;
    const double wrong = distance_of(p, r, which, right->gradient[which]);
    const double bound = which == DX ? most->dx : which == DWEIGHTS ? most->single : most->rows;
    if (!(wrong <= bound)) fail(t, names[which], wrong);
  }
}

/* ---- Dropout ------------------------------------------------------------------------- */

/* Columns of row 0 of an expert's A that have a gradient, as marks. */
static void read_columns(const problem *p, const result *r, int which, int expert, int64_t cols,
                         uint8_t *keeps) {
  const float *row = (const float *)r->gradient[which] + expert * size_of_matrix(p, which);
  for (int64_t c = 0; c < cols; c++) keeps[c] = row[c] != 0.0f;
}

/* What is dropped for one choice; ids of all others count as -1. */
static void read_choice(problem *p, kt_pool *pool, int64_t pair, const result *r) {
  const int64_t hidden = p->moe.hidden, inner = p->moe.intermediate;
  problem one = *p;
  int64_t *ids = guarded((size_t)pairs_of(p) * sizeof *ids);
  for (int64_t i = 0; i < pairs_of(p); i++) ids[i] = i == pair ? p->ids[pair] : -1;
  one.call.ids = ids, one.call.id_size = 8;
  compute(&one, pool, r);
  for (int which = GATE_A; which <= UP_A; which += 2)
    if (p->matrix[which])
      read_columns(p, r, which, p->ids[pair], hidden, p->keeps_x + pair * hidden);
  if (p->matrix[DOWN_A])
    read_columns(p, r, DOWN_A, p->ids[pair], inner, p->keeps_middle + pair * inner);
}

/* As many are kept as the chance says, up to 5 standard deviations, and other ones in each row. */
static void check_marks(const trial *t, const problem *p, const uint8_t *keeps, int64_t cols) {
  const double chance = 1.0 - (double)t->dropout;
  double kept = 0, rows = 0;
  const uint8_t *last = NULL;
  for (int64_t pair = 0; pair < pairs_of(p); pair++) {
    if (p->ids[pair] < 0) continue;
    const uint8_t *const row = keeps + pair * cols;
    if (last && memcmp(last, row, (size_t)cols) == 0) fail(t, "two choices drop the same", 0);
    for (int64_t i = 0; i < cols; i++) kept += row[i];
    last = row, rows++;
  }
  const double all = rows * (double)cols, off = fabs(kept - chance * all);
  if (off > 5 * sqrt(all * chance * (1 - chance))) fail(t, "share of what is kept", kept / all);
}

static void read_dropout(const trial *t, problem *p, kt_pool *pool) {
  const int64_t pairs = pairs_of(p);
  const result r = make_result(p, 1 << GATE_A | 1 << UP_A | 1 << DOWN_A);
  p->keeps_x = calloc((size_t)pairs, (size_t)p->moe.hidden);
  p->keeps_middle = calloc((size_t)pairs, (size_t)p->moe.intermediate);
  if (!p->keeps_x || !p->keeps_middle) exit(2);
  for (int64_t pair = 0; pair < pairs; pair++)
    if (p->ids[pair] >= 0) read_choice(p, pool, pair, &r);
  if (t->adapted & (FOR_GATE | FOR_UP)) check_marks(t, p, p->keeps_x, p->moe.hidden);
  if (t->adapted & FOR_DOWN) check_marks(t, p, p->keeps_middle, p->moe.intermediate);
  const int64_t same = t->hidden < p->moe.intermediate ? t->hidden : p->moe.intermediate;
  if (memcmp(p->keeps_x, p->keeps_middle, (size_t)same) == 0)
    fail(t, "both inputs drop the same", 0);
  release_result(p, &r);
}

/* ---- One problem on every level --------------------------------------------------------- */

/* The forward alone, which saves nothing; without LoRA, that of kt_moe_forward. */
static void check_forward(const trial *t, const problem *p, kt_pool *pool, const void *y) {
  const room m = make_room(p, pool);
  void *const again = guarded(y_bytes(p));
  if (forward(p, pool, &m, NULL, again) != KT_OK || memcmp(again, y, y_bytes(p)))
    fail(t, "y of a forward that saves nothing", 0);
  if (!t->adapted) {
    kt_moe_call call = p->call;
    call.y = memset(again, 0xff, y_bytes(p));
    if (kt_moe_forward(&p->moe, pool, &call, m.scratch, m.scratch_size) != KT_OK ||
        memcmp(again, y, y_bytes(p)))
      fail(t, "y of kt_moe_forward", 0);
  }
  release(again, y_bytes(p));
  release_room(&m);
}

/* Whether AMX reads bf16 next to the format's integers. */
static int rounds_in_amx(const trial *t, const problem *p) {
  const kt_layout *const layout = &p->moe.layout;
  const int groups = layout->format == KT_FORMAT_GINT4 || layout->format == KT_FORMAT_GINT8;
  return groups && layout->group <= 64 && t->adapted;
}

static int is_rounded(const trial *t, const problem *p) {
  return rounds_in_amx(t, p) && kt_isa_active() == KT_ISA_AMX;
}

/* All levels by the truth, and others than scalar by scalar, too. */
static void check_levels(const trial *t, const problem *p, kt_pool *const *pools, int number) {
  const numbers truth = make_numbers(p), in_bf16 = make_numbers(p), scalar = make_numbers(p);
  problem reads_bf16 = *p;
  const result r = make_result(p, -1), other = make_result(p, -1);
  compute_truth(p, truth.y, truth.gradient);
  reads_bf16.reads_bf16 = 1;
  if (rounds_in_amx(t, p)) compute_truth(&reads_bf16, in_bf16.y, in_bf16.gradient);
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    kt_isa_use(kt_isa_at(i));
    compute(p, pools[number % POOLS], &r);
    compute(p, pools[(number + 1) % POOLS], &other);
    expect_same(t, p, &r, &other, "another number of threads");
    expect_near(t, p, &r, is_rounded(t, p) ? &in_bf16 : &truth, &of_truth);
    if (t->adapted && t->lora_dtype == KT_BF16)
      expect_rounded(t, p, pools[(number + 2) % POOLS], &r);
    check_forward(t, p, pools[(number + 2) % POOLS], r.y);
    if (kt_isa_at(i) == KT_ISA_SCALAR)
      numbers_of(p, &r, &scalar);
    else
      expect_near(t, p, &r, &scalar, is_rounded(t, p) ? &of_rounded : &of_levels);
  }
  free_numbers(&truth);
  free_numbers(&in_bf16);
  free_numbers(&scalar);
  release_result(p, &r);
  release_result(p, &other);
}

static void check_trial(const trial *t, kt_pool *const *pools, int number) {
  problem p;
  state = (uint64_t)number + 1;
  kt_isa_use(KT_ISA_SCALAR);
  make_problem(t, &p);
  if (t->dropout > 0.0f) read_dropout(t, &p, pools[0]);
  check_levels(t, &p, pools, number);
  free_problem(&p);
}

int main(void) {
  static const int32_t nodes[POOLS][POOLS] = {{0}, {0, 1}, {0, 0, 1}};
  kt_pool *pools[POOLS];
  assume_amx();
  for (int i = 0; i < POOLS; i++)
    if (kt_pool_create(i + 1, NULL, nodes[i], pools + i) != KT_OK) return 2;
  for (int i = 0; i < (int)(sizeof trials / sizeof *trials); i++) check_trial(trials + i, pools, i);
  for (int i = 0; i < POOLS; i++) kt_pool_destroy(pools[i]);
  printf("%d failures up to level %s\n", failures, kt_isa_name(kt_isa_available()));
  return failures != 0;
}
