/* random_refusals.h - calls with one argument that cannot be: the status, and nothing more. */
#ifndef KT_TEST_RANDOM_REFUSALS_H
#define KT_TEST_RANDOM_REFUSALS_H

#include "random_adapted.h"
#include "random_training.h"

/* A refusal X(name, who, what): the wrong thing, and who must refuse it. Of lists of them, a
 * function for each and a table. */
#define MAKES(type, name, ...)                                                                     \
  static void name(type *a) { __VA_ARGS__; }
#define ROW(name, who, ...) {#name, name, who},

/* ---- Weights --------------------------------------------------------------------------- */

enum {
  BY_DECODE = 1, /* kt_decode, kt_largest */
  BY_QUANTIZE = 2,
  BY_PACK = 4, /* kt_pack, kt_unpack */
  BY_AUDIT = 8,
  BY_CODES = 16, /* kt_audit_codes */
  BY_ENCODE = 32,
  BY_ENCODED = 64, /* kt_audit_encoded */
  BY_BLOCKS = 128, /* kt_encode_blocks, kt_audit_blocks */
  BY_MATRIX = BY_DECODE | BY_QUANTIZE | BY_AUDIT | BY_ENCODE | BY_ENCODED | BY_BLOCKS,
  BY_LAYOUT = BY_QUANTIZE | BY_PACK | BY_AUDIT | BY_CODES
};

typedef struct arguments {
  weights_case c;
  kt_encoding encoding;
  const kt_layout *layout;
  const kt_matrix *matrix;
  const kt_choice *choice;
  int64_t rows, cols, first;
  void *codes, *scale, *packed, *packed_scale, *scratch;
  float *floats, tensor_scale;
  size_t scratch_size;
} arguments;

static void draw_odd_importance(arguments *a) {
  static const float odd[] = {-1.0f, NAN, INFINITY, 0x1.0002p32f, -INFINITY};
  for (int64_t k = 0; k < a->cols; k++) a->floats[k] = 1.0f;
  a->floats[below(a->cols)] = ONE_OF(odd);
  a->c.choice = (kt_choice){KT_RULE_SEARCH, a->floats};
  a->choice = &a->c.choice;
}

#define M (a->c.source.m)
#define WEIGHTS_REFUSED(X)                                                                         \
  X(no_layout, BY_LAYOUT, a->layout = NULL)                                                        \
  X(other_format, BY_LAYOUT, a->c.layout.format = no_number())                                     \
  X(other_group, BY_LAYOUT, a->c.layout.group = one_in(2) ? no_number() : 48)                      \
  X(other_scales, BY_LAYOUT, a->c.layout.scale_dtype = no_number())                                \
  X(no_matrix, BY_MATRIX, a->matrix = NULL)                                                        \
  X(no_data, BY_MATRIX, M.data = NULL)                                                             \
  X(few_rows, BY_MATRIX | BY_LAYOUT, M.rows = a->rows = absurd())                                  \
  X(few_cols, BY_MATRIX | BY_LAYOUT, M.cols = a->cols = absurd())                                  \
  X(many_rows, BY_MATRIX | BY_LAYOUT, M.rows = a->rows = huge(), M.row_stride = M.cols)            \
  X(many_cols, BY_MATRIX | BY_LAYOUT, M.cols = a->cols = huge(), M.col_stride = 1,                 \
    M.row_stride = 1)                                                                              \
  X(many_of_both, BY_MATRIX | BY_LAYOUT, M.rows = a->rows = (int64_t)1 << 40,                      \
    M.cols = a->cols = (int64_t)1 << 40)                                                           \
  X(odd_rows, BY_LAYOUT, M.rows = a->rows += 1 + below(31))                                        \
  X(odd_cols, BY_LAYOUT | BY_ENCODED, M.cols = a->cols += 1 + below(31))                           \
  X(few_to_row, BY_MATRIX, M.row_stride = absurd())                                                \
  X(few_to_col, BY_MATRIX, M.col_stride = absurd())                                                \
  X(both_strides, BY_MATRIX, M.row_stride = M.col_stride = 2)                                      \
  X(far_rows, BY_MATRIX, M.row_stride = huge(), M.col_stride = 1)                                  \
  X(far_cols, BY_MATRIX, M.col_stride = huge(), M.row_stride = 1)                                  \
  X(no_dtype, BY_MATRIX, M.dtype = no_number())                                                    \
  X(no_scales, BY_MATRIX, M.dtype = KT_I8, M.block_scale = NULL)                                   \
  X(zeros_alone, BY_MATRIX, M.block_scale = NULL, M.zero_point = a->floats)                        \
  X(groups_alone, BY_MATRIX, M.block_scale = NULL, M.group_of_col = (const int32_t *)a->codes)     \
  X(no_blocks, BY_MATRIX, M.block_scale = a->floats, M.block_rows = absurd())                      \
  X(no_block_cols, BY_MATRIX, M.block_scale = a->floats, M.block_rows = 1,                         \
    M.block_cols = absurd())                                                                       \
  X(no_grid, BY_MATRIX, M.block_scale = a->floats, M.block_rows = M.block_cols = 1,                \
    M.scale_stride = absurd())                                                                     \
  X(rows_before, BY_MATRIX, M.block_scale = a->floats,                                             \
    M.block_rows = M.block_cols = M.scale_stride = 1, M.row_origin = -1 - below(99),               \
    M.col_origin = 0)                                                                              \
  X(cols_before, BY_MATRIX, M.block_scale = a->floats,                                             \
    M.block_rows = M.block_cols = M.scale_stride = 1, M.col_origin = INT64_MIN, M.row_origin = 0)  \
  X(rows_far, BY_MATRIX, M.block_scale = a->floats,                                                \
    M.block_rows = M.block_cols = M.scale_stride = 1, M.col_origin = 0, M.row_origin = huge())     \
  X(cols_far, BY_MATRIX, M.block_scale = a->floats,                                                \
    M.block_rows = M.block_cols = M.scale_stride = 1, M.col_origin = INT64_MAX, M.row_origin = 0)  \
  X(wide_grid, BY_MATRIX, M.block_scale = a->floats, M.block_rows = M.block_cols = 1,              \
    M.scale_stride = INT64_MAX / 2, M.col_origin = M.row_origin = 0)                               \
  X(scales_and_factors, BY_MATRIX, M.row_scale = a->floats, M.row_factor = a->floats)              \
  X(cut_before, BY_MATRIX, M.first_col = -32)                                                      \
  X(cut_odd, BY_MATRIX, M.first_col = 5)                                                           \
  X(cut_far, BY_MATRIX, M.first_col = one_in(2) ? 256 : INT64_MAX)                                 \
  X(no_rule, BY_QUANTIZE | BY_AUDIT, a->c.choice.rule = no_number(),                               \
    a->c.choice.importance = NULL, a->choice = &a->c.choice)                                       \
  X(importance_alone, BY_QUANTIZE | BY_AUDIT, a->c.choice.rule = KT_RULE_AMAX,                     \
    a->c.choice.importance = a->floats, a->choice = &a->c.choice)                                  \
  X(odd_importance, BY_QUANTIZE | BY_AUDIT, draw_odd_importance(a))                                \
  X(no_codes, BY_LAYOUT | BY_DECODE | BY_ENCODE | BY_ENCODED | BY_BLOCKS, a->codes = NULL)         \
  X(no_packed, BY_PACK | BY_AUDIT | BY_CODES, a->packed = NULL)                                    \
  X(no_packed_scale, BY_PACK | BY_AUDIT, a->packed_scale = NULL)                                   \
  X(no_room, BY_QUANTIZE | BY_AUDIT | BY_ENCODE, a->scratch = NULL)                                \
  X(little_room, BY_QUANTIZE | BY_AUDIT | BY_ENCODE,                                               \
    a->scratch_size = one_in(2) ? 0 : a->scratch_size - 1)                                         \
  X(first_before, BY_AUDIT, a->first = -32 * (1 + below(99)))                                      \
  X(first_odd, BY_AUDIT, a->first = 1 + below(31))                                                 \
  X(first_far, BY_AUDIT, a->first = one_in(2) ? a->rows : INT64_MAX / 32 * 32)                     \
  X(no_kind, BY_ENCODE | BY_ENCODED, a->encoding.kind = no_number())                               \
  X(no_such_group, BY_ENCODE | BY_ENCODED, a->encoding.kind = KT_ENCODE_MXFP4,                     \
    a->encoding.group = 64)                                                                        \
  X(group_below, BY_ENCODE | BY_ENCODED, a->encoding.group = -1)                                   \
  X(no_half, BY_ENCODE | BY_ENCODED, a->encoding.half = no_number())                               \
  X(no_search, BY_ENCODE | BY_ENCODED, a->encoding.search = no_number())                           \
  X(no_tensor_scale, BY_ENCODE | BY_ENCODED,                                                       \
    a->encoding = (kt_encoding){KT_ENCODE_NVFP4, 16, 0, 0},                                        \
    a->tensor_scale = one_in(2) ? NAN : -1.0f)
#define MAKES_WEIGHTS(name, who, ...) MAKES(arguments, name, __VA_ARGS__)
WEIGHTS_REFUSED(MAKES_WEIGHTS)
#undef M

typedef struct weights_refusal {
  const char *name;
  void (*make)(arguments *a);
  int by;
} weights_refusal;

static const weights_refusal weights_refusals[] = {WEIGHTS_REFUSED(ROW)};
enum { WEIGHTS_REFUSALS = sizeof weights_refusals / sizeof *weights_refusals };

static inline void refuse_matrix(const arguments *a, int by) {
  kt_position *const bad = room(sizeof *bad, 8);
  void *const any = room(64, 8);
  float *const f = a->floats, *const out = a->codes ? f : NULL;
  const kt_matrix *const m = a->matrix;
  if (by & BY_DECODE) {
    REFUSED_CALL(CALLED(kt_decode, m, out));
    REFUSED_CALL(CALLED(kt_largest, m, out, a->scratch, a->scratch_size, bad));
  }
  if (by & BY_QUANTIZE) {
    REFUSED_CALL(CALLED(kt_quantize, a->layout, m, a->choice, a->codes, a->scale, a->scratch,
                        a->scratch_size, bad));
    void *const packed = a->codes ? a->packed : NULL;
    REFUSED_CALL(CALLED(kt_quantize_pack, a->layout, m, a->choice, packed, a->packed_scale,
                        a->scratch, a->scratch_size, bad));
  }
  if (by & BY_AUDIT)
    REFUSED_CALL(CALLED(kt_audit_run, a->layout, m, a->choice, a->rows, a->first,
                        a->codes ? a->packed : NULL, a->packed_scale, f, f, f, NULL, any,
                        a->scratch, a->scratch_size));
  if (by & BY_QUANTIZE) {
    kt_proven one = {.matrix = m,
                     .choice = a->choice,
                     .packed = a->codes ? a->packed : NULL,
                     .packed_scale = a->packed_scale,
                     .error = f,
                     .amax = f,
                     .rule = f};
    REFUSED_CALL(
        CALLED(kt_quantize_audit, a->layout, &one, 1, a->scratch, a->scratch_size, NULL, bad));
  }
  if (by & BY_ENCODE)
    REFUSED_CALL(CALLED(kt_encode, &a->encoding, m, a->tensor_scale, a->codes, a->scale, a->scratch,
                        a->scratch_size, bad));
  if (by & BY_ENCODED) {
    REFUSED_CALL(
        CALLED(kt_audit_encoded, &a->encoding, m, a->tensor_scale, a->codes, a->scale, any));
    uint64_t sums[2];
    REFUSED_CALL(CALLED(kt_encode_audit, &a->encoding, m, a->tensor_scale, a->codes, a->scale,
                        a->scratch, a->scratch_size, any, sums, bad));
  }
  if (by & BY_BLOCKS) {
    REFUSED_CALL(
        CALLED(kt_encode_blocks, KT_Q8_0, m, NULL, a->codes, a->scratch, a->scratch_size, bad));
    REFUSED_CALL(CALLED(kt_audit_blocks, KT_Q8_0, m, a->codes, any));
  }
}

static inline void refuse_layout(const arguments *a, int by) {
  const kt_layout *const layout = a->layout;
  if (by & BY_PACK) {
    REFUSED_CALL(
        CALLED(kt_pack, layout, a->rows, a->cols, a->codes, a->scale, a->packed, a->packed_scale));
    REFUSED_CALL(CALLED(kt_unpack, layout, a->rows, a->cols, a->packed, a->packed_scale, a->codes,
                        a->scale));
  }
  if (by & BY_CODES)
    REFUSED_CALL(CALLED(kt_audit_codes, layout, a->packed, a->rows, a->cols, a->codes));
  if ((by & BY_LAYOUT) != BY_LAYOUT || !a->codes) return;
  counted(OF_kt_packed_size, kt_packed_size(layout, a->rows, a->cols) == 0);
  counted(OF_kt_scale_size, kt_scale_size(layout, a->rows, a->cols) == 0);
  REFUSED_CALL(CALLED(kt_product_check, layout, a->rows, a->cols));
}

/* Layouts that are quantized, so that every function would take the arguments as they were. */
static inline const kt_layout *some_quantized_layout(void) {
  for (;;) {
    const kt_layout *const layout = layouts + below(layout_count);
    kt_layout_traits traits;
    if (kt_layout_describe(layout, &traits) == KT_OK && traits.max_level) return layout;
  }
}

static void weights_refusal_case(int number) {
  const weights_refusal *const r = weights_refusals + number;
  const kt_layout *const layout = some_quantized_layout();
  arguments a = {.c = draw_weights(layout, (int)below(KT_F32 + 1)), .tensor_scale = 1.0f};
  weights_case *const c = &a.c;
  a.layout = &c->layout, a.matrix = &c->source.m, a.choice = &c->choice;
  a.rows = c->rows, a.cols = c->cols;
  a.encoding = (kt_encoding){KT_ENCODE_INT4, 32, 0, 0};
  c->source.m.round_to_bf16 = 1;
  a.codes = room((size_t)(c->rows * c->cols) * 2, 8);
  a.scale = room((size_t)(c->rows * c->cols) * 4, 8);
  a.packed = room(c->packed_size, 1), a.packed_scale = room(c->scale_size, 4);
  a.floats = room((size_t)(c->rows * c->cols) * 4, 4);
  a.scratch = room(c->scratch_size, 4), a.scratch_size = c->scratch_size;
  const size_t length = strlen(inputs);
  snprintf(inputs + length, sizeof inputs - length, ": %s", r->name);
  r->make(&a);
  use_level((int)below(level_count));
  refuse_matrix(&a, r->by);
  refuse_layout(&a, r->by);
}

/* ---- Small functions ------------------------------------------------------------------------ */

static void compensate_refusal_case(int number) {
  float *const f = room(64, 4);
  int32_t *const groups = room(16, 4);
  double *const loss = room(16, 8);
  for (int i = 0; i < 16; i++) f[i] = 1.0f;
  for (int i = 0; i < 4; i++) groups[i] = 0;
  int64_t rows = 2, cols = 4, stride = 4, count = 1;
  int32_t top = 7;
  const void *weights = f;
  snprintf(inputs, sizeof inputs, "argument %d", number);
  switch (number) {
  case 0: rows = absurd(); break;
  case 1: cols = absurd(); break;
  case 2: cols = KT_COMPENSATE_COLS + 1; break;
  case 3: stride = absurd(); break;
  case 4: top = one_in(2) ? 0 : 128; break;
  case 5: count = absurd(); break;
  case 6: groups[below(4)] = one_in(2) ? 1 : INT32_MIN; break;
  case 7: f[5 * below(3)] = one_in(2) ? NAN : -0.0f; break;
  case 8: rows = huge(), stride = huge(); break;
  case 9: count = huge(), rows = huge(); break;
  default: weights = NULL;
  }
  use_level((int)below(level_count));
  REFUSED_CALL(CALLED(kt_compensate, top, rows, cols, weights, stride, f, f, count, groups,
                      (int8_t *)room(8, 1), (float *)room(32, 4), loss));
}

static void encoded_sizes_case(int number) {
  static const int64_t counts[] = {1, 31, 128, INT32_MAX, (int64_t)1 << 40};
  const int integers = number % 8 - 1 <= KT_ENCODE_INT8 || one_in(4);
  kt_encoded *const sizes = room(sizeof *sizes, 8);
  const kt_encoding e = {number % 8 - 1, one_in(2) ? 0 : (int32_t)below(130), integers && one_in(2),
                         integers && one_in(2)};
  const int64_t rows = one_in(2) ? 1 : one_in(3) ? huge() : one_in(3) ? absurd() : ONE_OF(counts);
  const int64_t cols = one_in(2) ? huge() : one_in(3) ? absurd() : ONE_OF(counts);
  snprintf(inputs, sizeof inputs, "kind %d, group %d, %" PRId64 " x %" PRId64, e.kind, e.group,
           rows, cols);
  if (CALLED(kt_encoded_sizes, number > 8 ? NULL : &e, rows, cols, sizes) != KT_OK) return;
  const double bytes = (double)sizes->row_size * (double)rows;
  const double scales = (double)sizes->scale_rows * (double)sizes->scale_cols;
  if (rows < 1 || cols < 1 || sizes->row_size < 1 || bytes > 0x1p63 || scales < 0 ||
      scales * (double)sizes->scale_size > 0x1p63)
    FAILED("sizes that cannot be");
}

/* ---- Layers ------------------------------------------------------------------------------------
 */

typedef struct asked {
  training t;
  kt_pool *pool;
  const kt_moe *moe;
  const kt_lora *lora;
  kt_moe_call *call;
  void *saved, *scratch;
  size_t scratch_size;
  trained r;
  kt_moe_gradients want;
} asked;

enum {
  OF_LAYER = 1,
  OF_FORWARD = 2,
  OF_TRAIN = 4,
  OF_BACKWARD = 8,
  OF_CALL = OF_FORWARD | OF_TRAIN | OF_BACKWARD
};

#define L (a->t.layer.moe)
#define C (*a->call)
#define LAYER_REFUSED(X)                                                                           \
  X(no_moe, OF_LAYER | OF_CALL, a->moe = NULL)                                                     \
  X(no_pool, OF_CALL, a->pool = NULL)                                                              \
  X(no_call, OF_CALL, a->call = NULL)                                                              \
  X(no_experts, OF_LAYER | OF_CALL, L.expert = NULL)                                               \
  X(few_experts, OF_LAYER | OF_CALL, L.experts = absurd())                                         \
  X(too_many_experts, OF_LAYER | OF_CALL, L.experts = huge())                                      \
  X(all_experts, OF_CALL, L.experts = INT32_MAX)                                                   \
  X(more_than_fit, OF_LAYER | OF_CALL, L.intermediate = L.intermediate / L.parts << 30,            \
    L.parts = 1 << 30, L.experts = INT32_MAX)                                                      \
  X(few_parts, OF_LAYER | OF_CALL, L.parts = absurd())                                             \
  X(many_parts, OF_LAYER | OF_CALL, L.parts = one_in(2) ? huge() : INT32_MAX)                      \
  X(other_parts, OF_LAYER | OF_CALL, L.parts = 7 * L.parts)                                        \
  X(few_hidden, OF_LAYER | OF_CALL, L.hidden = absurd())                                           \
  X(many_hidden, OF_LAYER | OF_CALL, L.hidden = one_in(2) ? huge() : KT_MAX_COLS + 128)            \
  X(odd_hidden, OF_LAYER | OF_CALL, L.hidden += 1 + below(31))                                     \
  X(few_inner, OF_LAYER | OF_CALL, L.intermediate = absurd())                                      \
  X(many_inner, OF_LAYER | OF_CALL, L.intermediate = huge())                                       \
  X(odd_inner, OF_LAYER | OF_CALL, L.intermediate += L.parts)                                      \
  X(no_function, OF_LAYER | OF_CALL, L.activation.function = no_number())                          \
  X(nan_limit, OF_LAYER | OF_CALL, L.activation.limit = one_in(2) ? NAN : -1.0f)                   \
  X(layer_format, OF_LAYER | OF_CALL, L.layout.format = no_number())                               \
  X(layer_group, OF_LAYER | OF_CALL, L.layout.group = no_number())                                 \
  X(few_tokens, OF_CALL, C.tokens = -1 - below(99))                                                \
  X(many_tokens, OF_CALL, C.tokens = one_in(2) ? INT64_MAX : (int64_t)1 << 62)                     \
  X(no_choices, OF_CALL, C.top_k = absurd())                                                       \
  X(many_choices, OF_CALL, C.top_k = one_in(2) ? huge() : 1 << 20)                                 \
  X(no_x, OF_CALL, C.x = NULL)                                                                     \
  X(odd_x, OF_CALL, C.x = (const uint8_t *)C.x + 1)                                                \
  X(other_x, OF_CALL, C.x_dtype = no_number())                                                     \
  X(no_ids, OF_CALL, C.ids = NULL)                                                                 \
  X(odd_ids, OF_CALL, C.ids = (const uint8_t *)C.ids + 1 + below(3))                               \
  X(other_ids, OF_CALL, C.id_size = one_in(2) ? 0 : one_in(2) ? 2 : no_number())                   \
  X(no_weights, OF_CALL, C.weights = NULL)                                                         \
  X(no_y, OF_FORWARD | OF_TRAIN, C.y = NULL)                                                       \
  X(odd_y, OF_FORWARD | OF_TRAIN, C.y = (uint8_t *)C.y + 1)                                        \
  X(other_y, OF_FORWARD | OF_TRAIN, C.y_dtype = one_in(2) ? KT_I8 : no_number())                   \
  X(no_scratch, OF_CALL, a->scratch = NULL)                                                        \
  X(odd_scratch, OF_CALL, a->scratch = (uint8_t *)a->scratch + 8 * (1 + below(7)))                 \
  X(no_scratch_size, OF_CALL, a->scratch_size = (size_t)below(64))                                 \
  X(with_add, OF_TRAIN, C.add = a->want.dweights)                                                  \
  X(no_rank, OF_TRAIN | OF_BACKWARD, a->t.lora.rank = one_in(2) ? absurd() : huge())               \
  X(high_rank, OF_TRAIN | OF_BACKWARD, a->t.lora.rank = KT_MAX_RANK + 1)                           \
  X(nan_scale, OF_TRAIN | OF_BACKWARD, a->t.lora.scale = NAN)                                      \
  X(all_dropped, OF_TRAIN | OF_BACKWARD, a->t.lora.dropout = 1.0f)                                 \
  X(lora_dtype, OF_TRAIN | OF_BACKWARD, a->t.lora.dtype = one_in(2) ? KT_F16 : no_number())        \
  X(half_pair, OF_TRAIN | OF_BACKWARD, a->t.lora.up_a = NULL, a->t.lora.up_b = a->scratch)         \
  X(odd_lora, OF_TRAIN | OF_BACKWARD, a->t.lora.up_a = (uint8_t *)a->scratch + 1,                  \
    a->t.lora.up_b = a->scratch)                                                                   \
  X(no_dy, OF_BACKWARD, a->want.dy = NULL)                                                         \
  X(other_dy, OF_BACKWARD, a->want.dy_dtype = no_number())                                         \
  X(other_dx, OF_BACKWARD, a->want.dx_dtype = no_number())                                         \
  X(odd_dweights, OF_BACKWARD, a->want.dweights = (void *)((uint8_t *)a->scratch + 2))             \
  X(no_saved, OF_BACKWARD, a->saved = NULL)                                                        \
  X(odd_saved, OF_TRAIN | OF_BACKWARD, a->saved = (uint8_t *)a->scratch + 16)
#define MAKES_LAYER(name, who, ...) MAKES(asked, name, __VA_ARGS__)
LAYER_REFUSED(MAKES_LAYER)
#undef L
#undef C

typedef struct layer_refusal {
  const char *name;
  void (*make)(asked *a);
  int by;
} layer_refusal;

static const layer_refusal layer_refusals[] = {LAYER_REFUSED(ROW)};
enum { LAYER_REFUSALS = sizeof layer_refusals / sizeof *layer_refusals };

static inline void refuse_layer(const asked *a, int by) {
  const int64_t tokens = a->call ? a->call->tokens : 1, top_k = a->call ? a->call->top_k : 1;
  if (by & OF_LAYER) {
    REFUSED_CALL(CALLED(kt_moe_touch, a->moe, a->pool));
    counted(OF_kt_moe_scratch_size, kt_moe_scratch_size(a->moe, tokens, top_k, a->pool) == 0);
    counted(OF_kt_train_saved_size, kt_train_saved_size(a->moe, a->lora, tokens, top_k) == 0);
    counted(OF_kt_train_scratch_size,
            kt_train_scratch_size(a->moe, a->lora, tokens, top_k, a->pool) == 0);
  }
  if (by & OF_FORWARD)
    REFUSED_CALL(CALLED(kt_moe_forward, a->moe, a->pool, a->call, a->scratch, a->scratch_size));
  if (by & OF_TRAIN)
    REFUSED_CALL(CALLED(kt_train_forward, a->moe, a->lora, a->pool, a->call, a->saved, a->scratch,
                        a->scratch_size));
  if (by & OF_BACKWARD)
    REFUSED_CALL(CALLED(kt_train_backward, a->moe, a->lora, a->pool, a->call, a->saved, &a->want,
                        a->scratch, a->scratch_size));
}

static void layer_refusal_case(int number) {
  const layer_refusal *const r = layer_refusals + number;
  asked a = {.t = draw_training((int)below(layout_count), 0), .pool = ONE_OF(pools)};
  training *const t = &a.t;
  kt_moe_call call = t->call.call;
  if (!call.tokens || !t->adapted || t->call.asks_absent) return; /* too little to refuse */
  const int number_of_level = (int)below(level_count);
  use_level(number_of_level);
  a.moe = &t->layer.moe, a.lora = lora_of(t), a.call = &call;
  a.scratch_size = kt_train_scratch_size(a.moe, a.lora, call.tokens, call.top_k, a.pool);
  a.scratch = room(a.scratch_size, 64);
  a.saved = room(kt_train_saved_size(a.moe, a.lora, call.tokens, call.top_k), 64);
  void *const y = call.y = room(t->call.y_size, 4);
  const size_t weights_size = gradient_size(t, 1);
  a.r.gradient[1] = room(weights_size, 4);
  a.want = pointers(t, &a.r);
  memset(y, 0x77, t->call.y_size), memset(a.r.gradient[1], 0x77, weights_size);
  const size_t length = strlen(inputs);
  snprintf(inputs + length, sizeof inputs - length, ": %s", r->name);
  r->make(&a);
  refuse_layer(&a, r->by);
  if (!is_untouched(y, t->call.y_size) || !is_untouched(a.r.gradient[1], weights_size))
    FAILED("a refused call has written results");
}

/* ---- Routers
 * ---------------------------------------------------------------------------------------- */

static void router_refusal_case(int number) {
  kt_router r = {.experts = 8,
                 .top_k = 2,
                 .groups = 4,
                 .keep = 2,
                 .group_score = 1,
                 .jitter = -1.0f,
                 .p_norm = 1.0f,
                 .factor = 1.0f,
                 .masked = 0.0f};
  int64_t tokens = 3, *const ids = room(48, 8), *given = NULL;
  float *const logits = room(96, 4), *const weights = room(24, 4);
  const kt_router *router = &r;
  const void *read = logits;
  for (int i = 0; i < 24; i++) logits[i] = unit();
  snprintf(inputs, sizeof inputs, "argument %d", number);
  switch (number) {
  case 0: router = NULL; break;
  case 1: read = NULL; break;
  case 2: r.experts = one_in(2) ? absurd() : huge(); break;
  case 3: r.sinks = one_in(2) ? -1 : huge(); break;
  case 4: r.top_k = one_in(2) ? absurd() : 5; break;
  case 5: r.groups = one_in(2) ? absurd() : 3; break;
  case 6: r.keep = one_in(2) ? absurd() : 5; break;
  case 7: r.scoring = no_number(); break;
  case 8: r.group_score = no_number(); break;
  case 9: r.masked = NAN; break;
  case 10: r.jitter = one_in(2) ? NAN : 0.1f; break;
  case 11: r.p_norm = one_in(2) ? NAN : 0.0f; break;
  case 12: r.epsilon = -1.0f; break;
  case 13: r.least_sum = NAN; break;
  case 14: r.factor = INFINITY; break;
  case 15: tokens = -1 - below(9); break;
  case 16: r.sinks = 2; break;
  case 17: tokens = huge(); break;
  case 18:
    given = room(48, 8);
    for (int i = 0; i < 6; i++) given[i] = below(8);
    given[below(6)] = one_in(2) ? 8 : INT64_MIN;
    break;
  default: given = ids, tokens = huge(), memset(ids, 0, 48);
  }
  use_level((int)below(level_count));
  REFUSED_CALL(CALLED(kt_choose_experts, router, one_in(2) ? NULL : ONE_OF(pools), tokens, read,
                      given, ids, weights));
}

#endif
