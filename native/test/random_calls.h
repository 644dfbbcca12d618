/* random_calls.h - what the random calls of random_check.c share: memory of just the size that is
 * promised, levels, counts of calls, and words for what went wrong. */
#ifndef KT_TEST_RANDOM_CALLS_H
#define KT_TEST_RANDOM_CALLS_H

#include "layers.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>

/* ---- What is called, at which level --------------------------------------------- */

/* Functions of ktconv.h that take memory; tests/native/test_random_calls.py holds them to it. */
#define KT_FUNCTIONS(X)                                                                            \
  X(kt_cpu_detect)                                                                                 \
  X(kt_isa_use_named)                                                                              \
  X(kt_dtype_unit)                                                                                 \
  X(kt_decode)                                                                                     \
  X(kt_file_map)                                                                                   \
  X(kt_file_lost)                                                                                  \
  X(kt_file_unmap)                                                                                 \
  X(kt_layout_describe)                                                                            \
  X(kt_packed_size)                                                                                \
  X(kt_scale_size)                                                                                 \
  X(kt_quantize)                                                                                   \
  X(kt_pack)                                                                                       \
  X(kt_unpack)                                                                                     \
  X(kt_quantize_pack)                                                                              \
  X(kt_encoded_sizes)                                                                              \
  X(kt_encode)                                                                                     \
  X(kt_encode_blocks)                                                                              \
  X(kt_largest)                                                                                    \
  X(kt_compensate)                                                                                 \
  X(kt_audit_run)                                                                                  \
  X(kt_quantize_audit)                                                                             \
  X(kt_byte_sum)                                                                                   \
  X(kt_same_bytes)                                                                                 \
  X(kt_audit_codes)                                                                                \
  X(kt_audit_encoded)                                                                              \
  X(kt_encode_audit)                                                                               \
  X(kt_audit_blocks)                                                                               \
  X(kt_pool_create)                                                                                \
  X(kt_pool_destroy)                                                                               \
  X(kt_pool_threads)                                                                               \
  X(kt_pool_nodes)                                                                                 \
  X(kt_pool_empty)                                                                                 \
  X(kt_memory_bind)                                                                                \
  X(kt_memory_nodes)                                                                               \
  X(kt_memory_gather)                                                                              \
  X(kt_memory_populate)                                                                            \
  X(kt_memory_allowed)                                                                             \
  X(kt_product_check)                                                                              \
  X(kt_moe_has_kernels)                                                                            \
  X(kt_moe_scratch_size)                                                                           \
  X(kt_moe_forward)                                                                                \
  X(kt_moe_part_node)                                                                              \
  X(kt_moe_touch)                                                                                  \
  X(kt_choose_experts)                                                                             \
  X(kt_linear_forward)                                                                             \
  X(kt_rms_norm)                                                                                   \
  X(kt_rotate)                                                                                     \
  X(kt_attention_scratch_size)                                                                     \
  X(kt_attend)                                                                                     \
  X(kt_attention_layer_scratch_size)                                                               \
  X(kt_attention_layer_run)                                                                        \
  X(kt_routed_layer_run)                                                                           \
  X(kt_decoder_layers_scratch_size)                                                                \
  X(kt_decoder_layers_run)                                                                         \
  X(kt_train_saved_size)                                                                           \
  X(kt_train_scratch_size)                                                                         \
  X(kt_train_forward)                                                                              \
  X(kt_train_backward)                                                                             \
  X(kt_lora_pack)                                                                                  \
  X(kt_adapted_scratch_size)                                                                       \
  X(kt_adapted_forward)                                                                            \
  X(kt_queue_create)                                                                               \
  X(kt_queue_destroy)                                                                              \
  X(kt_queue_drain)                                                                                \
  X(kt_task_start)                                                                                 \
  X(kt_task_wait)                                                                                  \
  X(kt_task_counts)                                                                                \
  X(kt_flag_raise)                                                                                 \
  X(kt_moe_work_run)                                                                               \
  X(kt_limit_read)                                                                                 \
  X(kt_limit_dot)

#define AS_NUMBER(name) OF_##name,
#define AS_WORD(name) #name,
enum { KT_FUNCTIONS(AS_NUMBER) FUNCTIONS };
static const char *const function_names[FUNCTIONS] = {KT_FUNCTIONS(AS_WORD)};

/* Levels, and in the place of avx512 its parts. */
enum { MOST_LEVELS = 12 };
static const char *level_names[MOST_LEVELS];
static int level_count, level; /* level: the one in use */

static inline void find_levels(void) {
  for (int i = 0; kt_isa_has(kt_isa_at(i)); i++) {
    const char *const name = kt_isa_name(kt_isa_at(i));
    if (strcmp(name, "avx512")) level_names[level_count++] = name;
    for (int part = 0; strcmp(name, "avx512") == 0 && kt_isa_part(part); part++)
      level_names[level_count++] = kt_isa_part(part);
  }
}

static uint64_t accepted[FUNCTIONS][MOST_LEVELS], refused[FUNCTIONS][MOST_LEVELS];

/* ---- Where in the run, for whoever reads of a fault -------------------------------- */

static uint64_t seed, case_number;
static const char *subject_name = "start", *memory_name = "";
static int function_in_call = -1;
static char inputs[600]; /* of the case, in words */

static inline const char *where(void) {
  static char words[900];
  snprintf(words, sizeof words,
           "%s, level %s, %s: --memory %s --seed %" PRIu64 " --case %" PRIu64 ": %s",
           function_in_call < 0 ? "between calls" : function_names[function_in_call],
           level_count ? level_names[level] : "?", subject_name, memory_name, seed, case_number,
           inputs);
  return words;
}

#define FAILED(...)                                                                                \
  (failures++, printf("FAILED %s: ", where()), printf(__VA_ARGS__), printf("\n"), fflush(stdout))

/* A call of a function that returns a status. */
#define CALLED(name, ...) (function_in_call = OF_##name, left(OF_##name, name(__VA_ARGS__)))

static inline kt_status left(int function, kt_status status) {
  function_in_call = -1;
  if (status < KT_OK || status > KT_ERR_UNSUPPORTED) FAILED("status %d is none", (int)status);
  (status == KT_OK ? accepted : refused)[function][level]++;
  return status;
}

/* A call of one that returns a number or nothing; `good`: whether it is one of those that it
 * should return. */
static inline void counted(int function, int good) {
  accepted[function][level]++;
  if (!good) FAILED("%s: a wrong number", function_names[function]);
}

#define EXPECTED(status, call)                                                                     \
  do {                                                                                             \
    const kt_status found_ = (call), wanted_ = (status);                                           \
    if (found_ != wanted_)                                                                         \
      FAILED(#call ": %s, not: %s", kt_strerror(found_), kt_strerror(wanted_));                    \
  } while (0)

#define REFUSED_CALL(call)                                                                         \
  do {                                                                                             \
    if ((call) == KT_OK) FAILED("not refused: " #call);                                            \
  } while (0)

static inline void use_level(int number) {
  level = number;
  EXPECTED(KT_OK, CALLED(kt_isa_use_named, level_names[number]));
}

/* ---- Memory ----------------------------------------------------------------------- *
 *
 * HEAP: of malloc, for the sanitizer. AT_END: the last byte is the last readable one. AT_START: the
 * first is the first. What of their pages is not asked for is watched. All of it is freed at the
 * end of a case. */

typedef enum memory_mode { HEAP, AT_END, AT_START } memory_mode;
static const char *const memory_names[] = {"heap", "end", "start"};
static memory_mode mode;

enum { WATCHED = 0xa5, MOST_PIECES = 600 };

typedef struct piece {
  uint8_t *base, *data; /* base: of malloc, or the first readable page */
  size_t size, inner;   /* inner: of the readable pages */
  int sealed;
} piece;

static piece pieces[MOST_PIECES];
static int piece_count;

/* Pages of earlier pieces between their unreadable ones, the next to be used last: to map others
 * takes longer than most of what is computed in them. */
enum { MOST_SPARE = 2000 };
typedef struct spare {
  uint8_t *base;
  size_t inner;
} spare;
static spare spares[MOST_SPARE];
static int spare_count;

static inline uint8_t *spare_pages(size_t inner) {
  for (int i = spare_count; i-- > 0;)
    if (spares[i].inner == inner) {
      uint8_t *const base = spares[i].base;
      spares[i] = spares[--spare_count];
      return base;
    }
  return NULL;
}

static inline void release_pages(const piece *p) {
  if (spare_count == MOST_SPARE) {
    free_pages(p->base, p->inner);
    return;
  }
  if (p->sealed && mprotect(p->base, p->inner, PROT_READ | PROT_WRITE)) exit(2);
  spares[spare_count++] = (spare){p->base, p->inner};
}

static inline void *mapped(size_t size, piece *p) {
  p->inner = size ? whole_pages(size) : page_size();
  p->base = spare_pages(p->inner);
  if (!p->base) p->base = new_pages(p->inner);
  memset(p->base, WATCHED, p->inner);
  return p->base + (mode == AT_END ? p->inner - size : 0);
}

/* `size` bytes, aligned to `unit`, of which size is a multiple; where unit is 1, and sanitized, at
 * any address. They hold random bytes. */
static inline void *room(size_t size, size_t unit) {
  if (piece_count == MOST_PIECES) exit(2);
  piece *const p = pieces + piece_count++;
  *p = (piece){.size = size};
  if (mode == HEAP) {
    const size_t shift = unit == 1 ? draw() % 4 : 0;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, size + shift)) exit(2);
    p->base = memory, p->data = p->base + shift;
  } else {
    p->data = mapped(size, p);
  }
  memset(p->data, (int)(draw() & 0xff), size);
  return p->data;
}

/* The same for what the library only reads: nothing can write to it any more. */
static inline const void *seal(const void *data) {
  for (int i = piece_count; i-- > 0;)
    if (pieces[i].data == data && mode != HEAP) {
      pieces[i].sealed = mprotect(pieces[i].base, pieces[i].inner, PROT_READ) == 0;
      break;
    }
  return data;
}

static inline void release_piece(const piece *p) {
  if (mode == HEAP) {
    free(p->base);
    return;
  }
  for (size_t i = 0; i < p->inner; i++) {
    if (p->base + i == p->data) i += p->size;
    if (i < p->inner && p->base[i] != WATCHED) {
      FAILED("byte %td outside of %zu was written", p->base + i - p->data, p->size);
      break;
    }
  }
  release_pages(p);
}

static inline void release_rooms(int from) {
  while (piece_count > from) release_piece(pieces + --piece_count);
}

/* ---- Random numbers ------------------------------------------------------------------ */

static inline int64_t below(int64_t count) { return (int64_t)(draw() >> 8) % count; }
static inline int one_in(int64_t count) { return below(count) == 0; }
#define ONE_OF(array) ((array)[below((int64_t)(sizeof(array) / sizeof *(array)))])

static inline void draw_bytes(void *memory, size_t size) {
  uint8_t *const bytes = memory;
  for (size_t i = 0; i < size; i++) bytes[i] = (uint8_t)(draw() >> 16);
}

/* Numbers that no size, count or enumeration should be. */
static inline int64_t absurd(void) {
  static const int64_t numbers[] = {
      0, -1, -32, INT64_MIN, INT64_MIN / 2, INT32_MIN, -((int64_t)1 << 40),
  };
  return ONE_OF(numbers);
}

/* Numbers of which few fit into the address space together with another one. */
static inline int64_t huge(void) {
  static const int64_t numbers[] = {
      INT64_MAX,
      INT64_MAX - 31,
      INT64_MAX / 2 + 1,
      (int64_t)1 << 62,
      (int64_t)1 << 61,
      (int64_t)1 << 60,
      INT64_MAX / 8 / 128 * 128,
      INT64_MAX / 128 * 128,
      ((int64_t)1 << 60) - 128,
  };
  return ONE_OF(numbers);
}

/* Numbers of an enumeration that it does not have. */
static inline int32_t no_number(void) {
  static const int32_t numbers[] = {-1, 99, INT32_MIN, INT32_MAX, 1 << 20};
  return ONE_OF(numbers);
}

/* A binary32 of any kind: mostly ordinary, some zeros, denormals, huge ones; with `nonfinite` NaN
 * and Inf as well. */
static inline float draw_float(int nonfinite) {
  static const uint32_t odd[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff,
                                 0x00800000, 0x7f7fffff, 0xff7fffff, 0x34000000};
  static const uint32_t none[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001};
  const uint64_t which = draw() >> 32 & 63;
  uint32_t bits = which == 0 ? ONE_OF(odd) : which == 1 && nonfinite ? ONE_OF(none) : 0;
  if (which == 2) bits = (uint32_t)draw() & 0xfeffffff; /* any finite one */
  if (which > 2 || (which == 1 && !nonfinite)) return unit() / 16;
  float value;
  if ((bits & 0x7f800000) == 0x7f800000 && which != 1) bits ^= 0x40000000;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* What a refused call must leave alone. */
static inline int is_untouched(const void *memory, size_t size) {
  for (size_t i = 0; i < size; i++)
    if (((const uint8_t *)memory)[i] != 0x77) return 0;
  return 1;
}

/* ---- Comparing ------------------------------------------------------------------------ */

/* Results of the first level, kept to be compared with. */
typedef struct kept {
  uint8_t *bytes[8];
  size_t size[8];
  int count;
} kept;

static inline int same_floats(const void *a, const void *b, size_t size) {
  for (size_t i = 0; i < size; i += 4) {
    float x, y;
    memcpy(&x, (const uint8_t *)a + i, 4);
    memcpy(&y, (const uint8_t *)b + i, 4);
    if (memcmp(&x, &y, 4) && !(isnan(x) && isnan(y))) return 0;
  }
  return 1;
}

/* Keeps result `number`, or compares it with the one that is kept. floats: NaN is like NaN. */
static inline void compare(kept *k, int number, const char *what, const void *found, size_t size,
                           int floats) {
  if (number == k->count) {
    k->bytes[number] = malloc(size + 1);
    if (!k->bytes[number]) exit(2);
    memcpy(k->bytes[number], found, size);
    k->size[number] = size, k->count++;
    return;
  }
  if (k->size[number] == size && memcmp(k->bytes[number], found, size) == 0) return;
  if (floats && same_floats(k->bytes[number], found, size)) return;
  size_t at = 0;
  while (at < size && k->bytes[number][at] == ((const uint8_t *)found)[at]) at++;
  FAILED("%s is another one than at level %s, from byte %zu of %zu on", what, level_names[0], at,
         size);
}

static inline void forget(kept *k) {
  while (k->count) free(k->bytes[--k->count]);
}

#endif
