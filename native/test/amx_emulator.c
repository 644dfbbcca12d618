/* amx_emulator.c - AMX for tests on CPUs without it.
 *
 * Where the kernel grants tile data, the CPU executes all of it. Where it does not, most of these
 * instructions raise SIGILL, on CPUs that have AMX too: with KT_EMULATE_AMX set the kernel is not
 * asked. Those that need no tile data are never seen then, LDTILECFG, STTILECFG and TILERELEASE:
 * the configuration is the CPU's, and is read from the signal's frame. "configs" counts where it is
 * another than before, or the first after a reset.
 *
 * A handler of SIGILL that performs LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD(T1),
 * TILESTORED, TDPBSSD/SUD/USD/UUD and TDPBF16PS as the Intel SDM (volume 2, the pages of these
 * instructions) says, for the thread that executed them, and counts them. An instruction that was
 * performed once is a breakpoint in this process's memory, and goes to a handler of SIGTRAP.
 *
 *   cc -std=c11 -O2 -shared -fPIC native/test/amx_emulator.c -o amx_emulator.so
 *
 * kt_amx_emulator_step() makes a thread stop behind every instruction from its first product on, up
 * to a limit, so that those between two products are counted: a CPU switches AMX off where nothing
 * is multiplied for some hundred nanoseconds, which no counter of AMX instructions shows.
 *
 * Load it into a process (it installs itself), or LD_PRELOAD it: then it also grants the
 * tile state that a process asks the kernel for, and with KT_AMX_EMULATOR_REPORT=FILE it
 * writes its counters there at exit. Others may take SIGILL over (Python's faulthandler does):
 * call kt_amx_emulator_install() again. What is no AMX instruction goes to the handler before.
 * An exception ends the process by the signal that Linux makes of it, #GP by SIGSEGV and #UD by
 * SIGILL, after a line on stderr that says why.
 *
 * Not emulated: palettes other than 1, and restarting a load that faulted in the middle
 * (start_row is read and cleared, but a fault is an ordinary SIGSEGV of the handler). */
#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <fcntl.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, ROW_SIZE = 64, THREADS = 512, TRAP_FLAG = 0x100 };

/* ---- Counters -------------------------------------------------------------- */

enum counter { CONFIGS, LOADS, STORES, ZEROS, INT8_PRODUCTS, BF16_PRODUCTS, RELEASES, COUNTERS };

static const char *const counter_names[COUNTERS] = {
    "configs", "loads", "stores", "zeros", "int8_products", "bf16_products", "releases"};
static atomic_ullong counters[COUNTERS];
static atomic_int resets;

static void count(enum counter which) {
  atomic_fetch_add_explicit(&counters[which], 1, memory_order_relaxed);
}

void kt_amx_emulator_counts(uint64_t out[COUNTERS]) {
  for (int i = 0; i < COUNTERS; i++) out[i] = atomic_load(&counters[i]);
}

/* How often more than `gap_limit` other instructions are between two products of a thread; 0 where
 * no thread stops behind instructions. AMX's own do not count. */
static atomic_ullong gap_limit, long_gaps;

uint64_t kt_amx_emulator_gaps(void) { return atomic_load(&long_gaps); }

void kt_amx_emulator_reset(void) {
  atomic_store(&long_gaps, 0);
  for (int i = 0; i < COUNTERS; i++) atomic_store(&counters[i], 0);
  atomic_fetch_add(&resets, 1);
}

/* ---- Tile state, per thread -------------------------------------------------
 *
 * A table instead of thread-local storage: a library that is loaded late gets no static
 * TLS of this size, and any other kind may allocate, which a signal handler must not. */

typedef struct tile {
  int rows, colsb;
  uint8_t data[ROWS][ROW_SIZE];
} tile;

typedef struct state {
  atomic_int thread; /* 0: free */
  int palette, start_row, resets;
  uint64_t since; /* instructions since the last product; ends behind gap_limit */
  tile tiles[TILES];
} state;

static state states[THREADS];

/* The signal that the CPU's exception becomes, and the reason, which a CPU does not give. */
static void die(int number, const char *why) {
  static const char prefix[] = "AMX emulator: ";
  ssize_t written = write(2, prefix, sizeof prefix - 1);
  written += write(2, why, strlen(why));
  written += write(2, "\n", 1);
  (void)written;
  signal(number, SIG_DFL);
  raise(number);
  _exit(128 + number);
}

static void general_protection(const char *why) { die(SIGSEGV, why); } /* #GP */

static void undefined_instruction(const char *why) { die(SIGILL, why); } /* #UD */

static long raw_syscall(long number, const long a[6]) {
  register long r10 __asm__("r10") = a[3];
  register long r8 __asm__("r8") = a[4];
  register long r9 __asm__("r9") = a[5];
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  return result;
}

static void release(state *s) {
  s->palette = s->start_row = 0;
  memset(s->tiles, 0, sizeof s->tiles);
}

/* Of this process: after a fork the parent's threads have ended, as their tiles have. */
static int has_ended(int thread) {
  const long arguments[6] = {getpid(), thread, 0};
  return raw_syscall(SYS_tgkill, arguments) == -ESRCH;
}

/* The state of a thread that is no more, in its first state. Entries never become free again,
 * so that a search that ends at a free one has seen all that are in use. */
static state *inherit_state(int thread) {
  for (int i = 0; i < THREADS; i++) {
    state *s = states + (thread + i) % THREADS;
    int last = atomic_load(&s->thread);
    if (has_ended(last) && atomic_compare_exchange_strong(&s->thread, &last, thread)) {
      release(s);
      return s;
    }
  }
  die(SIGABRT, "more threads use tiles at once than it has room for");
  return NULL;
}

static state *own_state(void) {
  static const long none[6];
  const int thread = (int)raw_syscall(SYS_gettid, none);
  for (int i = 0; i < THREADS; i++) {
    state *s = states + (thread + i) % THREADS;
    int expected = 0;
    if (atomic_load(&s->thread) == thread ||
        atomic_compare_exchange_strong(&s->thread, &expected, thread))
      return s;
  }
  return inherit_state(thread);
}

/* ---- Decoding: VEX.128.pp.0F38.W0 opcode ModRM [SIB] [displacement] ---------- */

enum { PREFIX_NONE = 0, PREFIX_66 = 1, PREFIX_F3 = 2, PREFIX_F2 = 3 };
enum { VEX3 = 0xc4, BREAKPOINT = 0xcc }; /* the first byte, and what mark() makes of it */

typedef struct instruction {
  uint8_t *start;
  int prefix, opcode, mod, reg, rm, vvvv;
  int length;
  uint8_t *address; /* of memory operands; for tile loads and stores: of row 0 */
  int64_t stride;   /* index register times scale */
} instruction;

static int64_t register_value(const ucontext_t *context, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[order[number]];
}

static int32_t read_int32(const uint8_t *at) {
  int32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}

/* The address after ModRM; `at` is the byte behind it. Returns where the instruction ends. */
static const uint8_t *decode_address(instruction *in, const ucontext_t *context, const uint8_t *at,
                                     int x, int b) {
  int64_t base = 0;
  int displacement = in->mod == 1 ? 1 : in->mod == 2 ? 4 : 0;
  if (in->rm == 4) {
    const int sib = *at++, index = (sib >> 3 & 7) | x << 3, low = sib & 7;
    if (index != 4) in->stride = register_value(context, index) * (1 << (sib >> 6));
    if (low == 5 && in->mod == 0)
      displacement = 4;
    else
      base = register_value(context, low | b << 3);
  } else if (in->rm == 5 && in->mod == 0) {
    base = (int64_t)(at + 4); /* relative to the next instruction; none has an immediate */
    displacement = 4;
  } else {
    base = register_value(context, in->rm | b << 3);
  }
  if (displacement == 1) base += (int8_t)*at;
  if (displacement == 4) base += read_int32(at);
  in->address = (uint8_t *)base;
  return at + displacement;
}

/* 0 unless it has the form of an AMX instruction. */
static int decode(instruction *in, const ucontext_t *context) {
  uint8_t *const start = (uint8_t *)context->uc_mcontext.gregs[REG_RIP];
  if (start[0] != VEX3 && start[0] != BREAKPOINT) return 0;
  if ((start[1] & 0x1f) != 2) return 0; /* map 0F38 */
  in->start = start;
  const int x = !(start[1] & 0x40), b = !(start[1] & 0x20), w = start[2] >> 7;
  if (w || start[2] & 4 || !(start[1] & 0x80)) return 0; /* W0, L0; VEX.R would be tile 8 */
  in->prefix = start[2] & 3;
  in->vvvv = ~start[2] >> 3 & 15;
  in->opcode = start[3];
  in->mod = start[4] >> 6;
  in->reg = start[4] >> 3 & 7;
  in->rm = start[4] & 7;
  in->stride = 0;
  in->address = NULL;
  const uint8_t *end = start + 5;
  if (in->mod != 3) end = decode_address(in, context, end, x, b);
  in->length = (int)(end - start);
  return in->opcode == 0x49 || in->opcode == 0x4b || in->opcode == 0x5c || in->opcode == 0x5e;
}

/* ---- Performing ----------------------------------------------------------------- */

static void load_config(state *s, const uint8_t *from) {
  release(s);
  count(CONFIGS);
  if (from[0] == 0) return;
  if (from[0] != 1) general_protection("LDTILECFG: only palette 1 exists");
  for (int i = 2; i < 16; i++)
    if (from[i]) general_protection("LDTILECFG: a reserved byte is not 0");
  for (int i = 0; i < 16; i++) {
    const int colsb = from[16 + 2 * i] | from[17 + 2 * i] << 8, rows = from[48 + i];
    if (i >= TILES && (colsb || rows)) general_protection("LDTILECFG: there are 8 tiles");
    if (colsb > ROW_SIZE || rows > ROWS || !colsb != !rows)
      general_protection("LDTILECFG: a tile has up to 16 rows of up to 64 bytes, or neither");
    if (i < TILES) s->tiles[i].colsb = colsb, s->tiles[i].rows = rows;
  }
  s->palette = 1;
  s->start_row = from[1];
}

static void store_config(const state *s, uint8_t *to) {
  memset(to, 0, 64);
  if (!s->palette) return;
  to[0] = 1;
  to[1] = (uint8_t)s->start_row;
  for (int i = 0; i < TILES; i++) {
    to[16 + 2 * i] = (uint8_t)s->tiles[i].colsb;
    to[48 + i] = (uint8_t)s->tiles[i].rows;
  }
}

/* Where the signal's frame has the configuration of a CPU with AMX, from its beginning; else 0. */
static unsigned frame_config;

static void find_frame_config(void) {
  enum { LEAF_FEATURES = 7, AMX_TILE = 24, LEAF_STATES = 13, XFEATURE_XTILECFG = 17 };
  unsigned a, b, c, d;
  if (!__get_cpuid_count(LEAF_FEATURES, 0, &a, &b, &c, &d) || !(d >> AMX_TILE & 1)) return;
  if (__get_cpuid_count(LEAF_STATES, XFEATURE_XTILECFG, &a, &b, &c, &d)) frame_config = b;
}

/* The configuration in the frame, or NULL where that has none. */
static uint8_t *config_in_frame(const ucontext_t *context) {
  enum { MAGIC = 464, MAGIC_NUMBER = 0x46505853, STATES = 512, XTILECFG = 1 << 17 };
  uint8_t *const frame = (uint8_t *)context->uc_mcontext.fpregs;
  return frame && read_int32(frame + MAGIC) == MAGIC_NUMBER && read_int32(frame + STATES) & XTILECFG
             ? frame + frame_config
             : NULL;
}

/* Before an instruction: what the CPU configured itself meanwhile. */
static void take_config(state *s, const ucontext_t *context) {
  const int now = atomic_load(&resets);
  uint8_t own[64];
  if (!frame_config) return;
  const uint8_t *const found = config_in_frame(context);
  store_config(s, own);
  if (!found)
    release(s);
  else if (memcmp(found, own, sizeof own) != 0)
    load_config(s, found);
  else if (s->resets != now)
    count(CONFIGS);
  s->resets = now;
}

/* Behind it: it may have ended a load at start_row. */
static void give_config(const state *s, const ucontext_t *context) {
  uint8_t *const found = frame_config ? config_in_frame(context) : NULL;
  if (found) store_config(s, found);
}

static tile *usable(state *s, int number) {
  if (!s->palette) undefined_instruction("a tile instruction without LDTILECFG before it");
  if (!s->tiles[number].rows) undefined_instruction("a tile that LDTILECFG did not configure");
  return s->tiles + number;
}

/* A tile to be loaded or stored from start_row on. */
static tile *usable_rows(state *s, int number) {
  tile *t = usable(s, number);
  if (s->start_row >= t->rows) undefined_instruction("start_row is behind the last row");
  return t;
}

static void load_tile(state *s, const instruction *in) {
  tile *t = usable_rows(s, in->reg);
  count(LOADS);
  if (s->start_row == 0) memset(t->data, 0, sizeof t->data);
  for (int row = s->start_row; row < t->rows; row++) {
    memset(t->data[row], 0, ROW_SIZE);
    memcpy(t->data[row], in->address + row * in->stride, (size_t)t->colsb);
  }
  s->start_row = 0;
}

static void store_tile(state *s, const instruction *in) {
  const tile *t = usable_rows(s, in->reg);
  count(STORES);
  for (int row = s->start_row; row < t->rows; row++)
    memcpy(in->address + row * in->stride, t->data[row], (size_t)t->colsb);
  s->start_row = 0;
}

static void check_shapes(const tile *c, const tile *a, const tile *b) {
  if (c == a || c == b || a == b) undefined_instruction("a product with the same tile twice");
  if (a->colsb % 4 || b->colsb % 4 || c->colsb % 4) undefined_instruction("a product of odd rows");
  if (c->rows != a->rows || c->colsb != b->colsb || a->colsb / 4 != b->rows)
    undefined_instruction("a product of tiles that do not fit together");
}

/* What a product leaves outside of its rows and columns. */
static void clear_rest(tile *c) {
  for (int m = 0; m < ROWS; m++) {
    const int used = m < c->rows ? c->colsb : 0;
    memset(c->data[m] + used, 0, (size_t)(ROW_SIZE - used));
  }
}

/* Every CPU that is emulated has these (helpers/amx.py); columns that are not there are 0. */
#define VECTORS __attribute__((target("avx512f,avx512bw")))

/* Of 32 words the lower bytes, or the upper ones, as 16-bit numbers. */
VECTORS static __m512i lower_bytes(__m512i words, int is_signed) {
  const __m512i up = _mm512_slli_epi16(words, 8);
  return is_signed ? _mm512_srai_epi16(up, 8) : _mm512_srli_epi16(up, 8);
}

VECTORS static __m512i upper_bytes(__m512i words, int is_signed) {
  return is_signed ? _mm512_srai_epi16(words, 8) : _mm512_srli_epi16(words, 8);
}

VECTORS static void int8_product(tile *c, const tile *a, const tile *b, int a_signed,
                                 int b_signed) {
  for (int m = 0; m < c->rows; m++) {
    __m512i sums = _mm512_loadu_si512(c->data[m]);
    for (int k = 0; k < a->colsb / 4; k++) {
      const __m512i left = _mm512_set1_epi32(read_int32(a->data[m] + 4 * k));
      const __m512i right = _mm512_loadu_si512(b->data[k]);
      sums = _mm512_add_epi32(
          sums, _mm512_madd_epi16(lower_bytes(left, a_signed), lower_bytes(right, b_signed)));
      sums = _mm512_add_epi32(
          sums, _mm512_madd_epi16(upper_bytes(left, a_signed), upper_bytes(right, b_signed)));
    }
    _mm512_storeu_si512(c->data[m], sums);
  }
  clear_rest(c);
}

/* Of 16 pairs of bf16 the first numbers, or the second ones. */
VECTORS static __m512 first_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

VECTORS static __m512 second_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_srli_epi32(pairs, 16), 16));
}

/* Even and odd columns in two sums of fused operations from 0, added together and then to c.
 * MXCSR: to nearest even, denormals are zero and flushed to zero, whatever the thread's. */
VECTORS static void bf16_product(tile *c, const tile *a, const tile *b) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  for (int m = 0; m < c->rows; m++) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < a->colsb / 4; k++) {
      const __m512i left = _mm512_set1_epi32(read_int32(a->data[m] + 4 * k));
      const __m512i right = _mm512_loadu_si512(b->data[k]);
      even = _mm512_fmadd_ps(first_of(left), first_of(right), even);
      odd = _mm512_fmadd_ps(second_of(left), second_of(right), odd);
    }
    const __m512 sum = _mm512_loadu_ps(c->data[m]);
    _mm512_storeu_ps(c->data[m], _mm512_add_ps(sum, _mm512_add_ps(even, odd)));
  }
  _mm_setcsr(before);
  clear_rest(c);
}

static void end_gap(state *s, ucontext_t *context) {
  const uint64_t limit = atomic_load(&gap_limit);
  if (!limit) return;
  if (s->since > limit) atomic_fetch_add(&long_gaps, 1);
  s->since = 0;
  context->uc_mcontext.gregs[REG_EFL] |= TRAP_FLAG;
}

static void product(state *s, const instruction *in) {
  if (in->vvvv >= TILES) undefined_instruction("a product of a tile that does not exist");
  tile *c = usable(s, in->reg), *a = usable(s, in->rm), *b = usable(s, in->vvvv);
  check_shapes(c, a, b);
  s->start_row = 0;
  if (in->opcode == 0x5c) {
    count(BF16_PRODUCTS);
    bf16_product(c, a, b);
    return;
  }
  count(INT8_PRODUCTS);
  int8_product(c, a, b, in->prefix == PREFIX_F2 || in->prefix == PREFIX_F3,
               in->prefix == PREFIX_F2 || in->prefix == PREFIX_66);
}

static int perform_49(state *s, const instruction *in) {
  if (in->mod == 3) {
    if (in->prefix == PREFIX_NONE && in->reg == 0 && in->rm == 0) {
      count(RELEASES);
      release(s);
      return 1;
    }
    if (in->prefix != PREFIX_F2 || in->rm != 0) return 0;
    count(ZEROS);
    memset(usable(s, in->reg)->data, 0, sizeof s->tiles[0].data);
    s->start_row = 0;
    return 1;
  }
  if (in->reg != 0 || in->prefix > PREFIX_66) return 0;
  if (in->prefix == PREFIX_NONE)
    load_config(s, in->address);
  else
    store_config(s, in->address);
  return 1;
}

static int perform_4b(state *s, const instruction *in) {
  if (in->mod == 3 || in->rm != 4 || in->prefix == PREFIX_NONE) return 0;
  if (in->prefix == PREFIX_F3)
    store_tile(s, in);
  else
    load_tile(s, in);
  return 1;
}

static int perform(state *s, const instruction *in) {
  if (in->opcode == 0x49) return perform_49(s, in);
  if (in->opcode == 0x4b) return perform_4b(s, in);
  if (in->mod != 3 || (in->opcode == 0x5c && in->prefix != PREFIX_F3)) return 0;
  product(s, in);
  return 1;
}

/* ---- The handler ------------------------------------------------------------------ */

static struct sigaction before;

static int has_handler(void) {
  return before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN; /* also of SA_SIGINFO */
}

/* With the default the instruction runs again and ends the process. So does a signal that comes
 * while the handler before works: faulthandler prints, puts back what it found, which is us, and
 * raises again. */
static void pass_on(int number, siginfo_t *info, void *context) {
  static atomic_flag passing = ATOMIC_FLAG_INIT;
  if (!has_handler() || atomic_flag_test_and_set(&passing)) {
    signal(number, SIG_DFL);
    return;
  }
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(number, info, context);
  else
    before.sa_handler(number);
  atomic_flag_clear(&passing);
}

/* From now on a breakpoint is there: virtual machines leave it to the kernel, and take eight times
 * as long for an illegal instruction (12 us instead of 1.5). A thread finds one byte or the other.
 * Where the page cannot be written, the instruction stays. */
static void mark(uint8_t *start) {
  enum { PAGE = 4096 };
  void *const page = (void *)((uintptr_t)start & -(uintptr_t)PAGE);
  if (*start == VEX3 && mprotect(page, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC) == 0)
    *(volatile uint8_t *)start = BREAKPOINT;
}

/* Of tiles' data: the others are the CPU's own where it has AMX. */
static int is_of_data(const instruction *in) {
  return in->opcode != 0x49 || (in->mod == 3 && in->prefix == PREFIX_F2);
}

/* Performs the instruction, and those that follow: a signal takes longer than any of them. 0 if it
 * is none. */
static int perform_some(ucontext_t *context) {
  instruction in;
  state *const s = decode(&in, context) ? own_state() : NULL;
  if (s) take_config(s, context);
  if (!s || !perform(s, &in)) return 0;
  mark(in.start);
  do {
    if (in.opcode == 0x5c || in.opcode == 0x5e) end_gap(s, context);
    context->uc_mcontext.gregs[REG_RIP] += in.length;
  } while (decode(&in, context) && is_of_data(&in) && perform(s, &in));
  give_config(s, context);
  return 1;
}

static void on_illegal(int number, siginfo_t *info, void *context) {
  const int kept = errno;
  if (!perform_some(context)) pass_on(number, info, context);
  errno = kept;
}

/* A breakpoint, or the end of an instruction in a thread that stops behind each. Breakpoints of
 * others end the process, as without us. */
static void on_trap(int number, siginfo_t *info, void *opaque) {
  enum { BREAKPOINT_TRAP = 3 };
  ucontext_t *const context = opaque;
  greg_t *const registers = context->uc_mcontext.gregs;
  const int kept = errno;
  (void)info;
  if (registers[REG_TRAPNO] != BREAKPOINT_TRAP) {
    const uint64_t limit = atomic_load(&gap_limit);
    if (!limit || ++own_state()->since > limit) registers[REG_EFL] &= ~(greg_t)TRAP_FLAG;
  } else {
    registers[REG_RIP]--; /* it is behind the byte */
    if (!perform_some(context)) signal(number, SIG_DFL);
  }
  errno = kept;
}

/* Takes SIGILL and SIGTRAP, unless it has them already. */
void kt_amx_emulator_install(void) {
  struct sigaction ours = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER}, now;
  sigemptyset(&ours.sa_mask);
  ours.sa_sigaction = on_trap;
  sigaction(SIGTRAP, &ours, NULL);
  ours.sa_sigaction = on_illegal;
  sigaction(SIGILL, NULL, &now);
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_illegal) return;
  sigaction(SIGILL, &ours, &before);
}

/* While no other thread uses tiles. 0: no more. */
void kt_amx_emulator_step(uint64_t limit) {
  for (int i = 0; i < THREADS; i++) states[i].since = 0;
  atomic_store(&gap_limit, limit);
}

static void write_report(void) {
  const char *path = getenv("KT_AMX_EMULATOR_REPORT");
  FILE *file = path ? fopen(path, "w") : NULL;
  if (!file) return;
  for (int i = 0; i < COUNTERS; i++)
    fprintf(file, "%s %llu\n", counter_names[i], (unsigned long long)atomic_load(&counters[i]));
  fclose(file);
}

__attribute__((constructor)) static void start(void) {
  find_frame_config();
  kt_amx_emulator_install();
  if (getenv("KT_AMX_EMULATOR_REPORT")) atexit(write_report);
}

/* In front of the C library's (preloaded, or linked into the program): grants tile data that the
 * kernel refuses or is not asked for, passes the rest on. It takes six arguments where a caller
 * gave fewer, which the sanitizer of addresses would see. */
__attribute__((no_sanitize("address"))) long syscall(long number, ...) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
  va_end(arguments);
  const int tiles =
      number == SYS_arch_prctl && a[0] == ARCH_REQ_XCOMP_PERM && a[1] == XFEATURE_XTILEDATA;
  if (tiles && getenv("KT_EMULATE_AMX")) return 0;
  const long result = raw_syscall(number, a);
  if (result >= 0 || result < -4095) return result;
  if (tiles) return 0;
  errno = (int)-result;
  return -1;
}
