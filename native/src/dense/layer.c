/* Decoder layers of one token, from the kernels of their parts. */
#include "../pool/turn.h"
#include "dense.h"

#include <string.h>

enum { LINE = 64 };

static int64_t heads_of(const kt_attention_layer *l) { return l->projection[0].rows / l->cols; }
static int64_t hidden_of(const kt_attention_layer *l) { return l->out.rows; }

static int norm_fits(const kt_norm *norm, int64_t rows, int64_t cols) {
  return !norm->weight || norm->cols == cols || norm->cols == rows * cols;
}

static int fits(const kt_attention_layer *l) {
  for (int i = 0; i < 3; i++)
    if (!kt_linear_fits(&l->projection[i]) || l->projection[i].cols != hidden_of(l)) return 0;
  if (!kt_linear_fits(&l->out) || l->cols < 1 || l->key_heads < 1) return 0;
  const int64_t heads = heads_of(l), keys = l->projection[1].rows;
  if (heads < 1 || heads * l->cols != l->projection[0].rows || l->out.cols != heads * l->cols)
    return 0;
  if (keys != l->projection[2].rows || l->key_heads > keys || keys != l->key_heads * l->cols)
    return 0;
  return l->before.cols == hidden_of(l) && l->after.cols == hidden_of(l) &&
         norm_fits(&l->query_norm, heads, l->cols) &&
         norm_fits(&l->key_norm, l->key_heads, l->cols);
}

static int64_t round_up(int64_t elements) {
  const int64_t line = LINE / (int64_t)sizeof(uint16_t);
  return (elements + line - 1) / line * line;
}

/* Arrays of bf16 in scratch, one after the other, then that of attention. */
enum { NORMED, QUERY, QUERY_2, KEY, KEY_2, VALUE, ARRAYS };

static void sizes_of(const kt_attention_layer *l, int64_t *size) {
  size[NORMED] = hidden_of(l);
  size[QUERY] = size[QUERY_2] = l->projection[0].rows;
  size[KEY] = size[KEY_2] = size[VALUE] = l->projection[1].rows;
}

static uint16_t *arrays_in(const kt_attention_layer *l, uint16_t *scratch, uint16_t **array) {
  int64_t size[ARRAYS];
  sizes_of(l, size);
  for (int i = 0; i < ARRAYS; i++) {
    array[i] = scratch;
    scratch += round_up(size[i]);
  }
  return scratch;
}

static size_t arrays_size(const kt_attention_layer *l) {
  int64_t size[ARRAYS], sum = 0;
  sizes_of(l, size);
  for (int i = 0; i < ARRAYS; i++) sum += round_up(size[i]);
  return (size_t)sum * sizeof(uint16_t);
}

static kt_attention attention_of(const kt_attention_layer *l, const kt_attention_step *s,
                                 const uint16_t *queries, uint16_t *y) {
  const int64_t apart = s->room * l->cols;
  return (kt_attention){.heads = heads_of(l),
                        .key_heads = l->key_heads,
                        .cols = l->cols,
                        .value_cols = l->cols,
                        .tokens = s->tokens + 1,
                        .key_head = apart,
                        .key_token = l->cols,
                        .value_head = apart,
                        .value_token = l->cols,
                        .queries = queries,
                        .keys = s->keys,
                        .values = s->values,
                        .y = y,
                        .scale = l->scale};
}

size_t kt_attention_layer_scratch_size(const kt_attention_layer *layer, int64_t tokens) {
  if (!layer || !fits(layer) || tokens < 0 || tokens >= INT32_MAX) return 0;
  const kt_attention_step step = {.tokens = tokens, .room = tokens + 1};
  const kt_attention attention = attention_of(layer, &step, NULL, NULL);
  const size_t size = kt_attention_scratch_size(&attention);
  return size ? arrays_size(layer) + (size + LINE - 1) / LINE * LINE : 0;
}

/* `row` of heads, in `other` where there is a norm: which of the two it is. */
static int normed_in(const kt_norm *norm, int64_t size, const uint16_t *row, uint16_t *other,
                     kt_status *status) {
  if (!norm->weight) return 0;
  *status = kt_rms_norm(norm, size / norm->cols, row, other);
  return 1;
}

/* The token's keys and values behind those of each head. */
static kt_status keep(const kt_attention_layer *l, const kt_attention_step *s, const uint16_t *keys,
                      const uint16_t *values) {
  kt_status status = KT_OK;
  for (int64_t h = 0; h < l->key_heads && !status; h++) {
    const int64_t at = (h * s->room + s->tokens) * l->cols, from = h * l->cols;
    status = kt_rotate(1, l->cols, keys + from, s->cosine, s->sine, (uint16_t *)s->keys + at);
    memcpy((uint16_t *)s->values + at, values + from, (size_t)l->cols * sizeof *values);
  }
  return status;
}

/* y[i] += x[i] */
static void add(int64_t count, const uint16_t *restrict x, uint16_t *restrict y) {
  for (int64_t i = 0; i < count; i++)
    y[i] = kt_bf16_bits(kt_bf16_float(x[i]) + kt_bf16_float(y[i]));
}

static int step_fits(const kt_attention_step *s) {
  if (!s || s->tokens < 0 || s->tokens >= s->room || s->room > INT32_MAX) return 0;
  const void *const arrays[] = {s->x, s->cosine, s->sine, s->keys, s->values, s->h, s->normed};
  for (int i = 0; i < 7; i++)
    if (!kt_is_bf16_array(arrays[i])) return 0;
  return 1;
}

/* Queries, turned, in the array that is returned; the other one of the two is free. */
static kt_status project(const kt_attention_layer *l, kt_pool *pool, const kt_attention_step *s,
                         uint16_t **array, int *queries) {
  uint16_t *const to[] = {array[QUERY], array[KEY], array[VALUE]};
  kt_status status = kt_rms_norm(&l->before, 1, s->x, array[NORMED]);
  if (status) return status;
  status = kt_linears_run(l->projection, 3, pool, 1, array[NORMED], to);
  if (status) return status;
  const int q = QUERY + normed_in(&l->query_norm, l->projection[0].rows, array[QUERY],
                                  array[QUERY_2], &status);
  const int k =
      KEY + normed_in(&l->key_norm, l->projection[1].rows, array[KEY], array[KEY_2], &status);
  if (status) return status;
  *queries = q == QUERY ? QUERY_2 : QUERY;
  status = kt_rotate(heads_of(l), l->cols, array[q], s->cosine, s->sine, array[*queries]);
  return status ? status : keep(l, s, array[k], array[VALUE]);
}

kt_status kt_attention_layer_run(const kt_attention_layer *layer, kt_pool *pool,
                                 const kt_attention_step *step, void *scratch,
                                 size_t scratch_size) {
  if (!layer || !fits(layer) || !pool || !step_fits(step)) return KT_ERR_ARGUMENT;
  const size_t size = kt_attention_layer_scratch_size(layer, step->tokens);
  if (!size) return KT_ERR_ARGUMENT;
  if (!scratch || (uintptr_t)scratch % LINE || scratch_size < size) return KT_ERR_SCRATCH;
  uint16_t *array[ARRAYS], *const rest = arrays_in(layer, scratch, array);
  int queries = QUERY;
  kt_status status = project(layer, pool, step, array, &queries);
  if (status) return status;
  uint16_t *const h = step->h, *const attended = array[queries == QUERY ? QUERY_2 : QUERY];
  const kt_attention attention = attention_of(layer, step, array[queries], attended);
  status = kt_attend(&attention, pool, rest, size - arrays_size(layer));
  if (!status) status = kt_linears_run(&layer->out, 1, pool, 1, attended, &h);
  if (status) return status;
  add(hidden_of(layer), step->x, h);
  return kt_rms_norm(&layer->after, 1, step->h, step->normed);
}

/* ---- The router and its experts ------------------------------------------------ */

static int routes(const kt_routed_layer *l) {
  return l && l->moe && kt_linear_fits(&l->gate) && l->gate.cols == l->moe->hidden &&
         l->router.top_k <= l->router.experts && l->router.experts <= KT_MAX_ROUTED &&
         l->router.top_k > 0 && l->router.sinks >= 0 && l->router.sinks <= KT_MAX_ROUTED &&
         l->gate.rows == l->router.experts + l->router.sinks && l->gate.rows <= KT_MAX_ROUTED;
}

/* kt_routed_layer_run of what fits; nanoseconds of the experts are added to `expert_ns`. */
static kt_status route(const kt_routed_layer *layer, kt_pool *pool, const void *normed,
                       const void *h, void *y, int64_t *expert_ns, void *scratch,
                       size_t scratch_size) {
  uint16_t product[KT_MAX_ROUTED], *const to = product;
  float logits[KT_MAX_ROUTED], weights[KT_MAX_ROUTED];
  int64_t ids[KT_MAX_ROUTED];
  kt_status status = kt_linears_run(&layer->gate, 1, pool, 1, normed, &to);
  if (status) return status;
  for (int64_t i = 0; i < layer->gate.rows; i++) logits[i] = kt_bf16_float(product[i]);
  status = kt_choose_experts(&layer->router, NULL, 1, logits, NULL, ids, weights);
  if (status) return status;
  if (layer->rounded)
    for (int64_t i = 0; i < layer->router.top_k; i++)
      weights[i] = kt_bf16_float(kt_bf16_bits(weights[i]));
  const kt_moe_call call = {.tokens = 1,
                            .top_k = layer->router.top_k,
                            .x = normed,
                            .ids = ids,
                            .weights = weights,
                            .skip = layer->skip,
                            .y = y,
                            .id_size = sizeof *ids,
                            .x_dtype = KT_BF16,
                            .y_dtype = KT_BF16};
  const int64_t began = kt_nanoseconds();
  status = kt_moe_forward(layer->moe, pool, &call, scratch, scratch_size);
  *expert_ns += kt_nanoseconds() - began;
  if (!status) add(layer->moe->hidden, h, y);
  return status;
}

kt_status kt_routed_layer_run(const kt_routed_layer *layer, kt_pool *pool, const void *normed,
                              const void *h, void *y, void *scratch, size_t scratch_size) {
  if (!routes(layer) || !pool || !kt_is_bf16_array(normed) || !kt_is_bf16_array(h) ||
      !kt_is_bf16_array(y))
    return KT_ERR_ARGUMENT;
  int64_t expert_ns = 0;
  return route(layer, pool, normed, h, y, &expert_ns, scratch, scratch_size);
}

/* ---- One behind the other ------------------------------------------------------ */

static int all_fit(const kt_decoder_layer *layer, int64_t count) {
  if (!layer || count < 1) return 0;
  for (int64_t i = 0; i < count; i++) {
    const kt_attention_layer *const a = layer[i].attention;
    if (!a || !fits(a) || hidden_of(a) != hidden_of(layer[0].attention)) return 0;
    if (!routes(layer[i].routed) || layer[i].routed->moe->hidden != hidden_of(a)) return 0;
  }
  return 1;
}

size_t kt_decoder_layers_scratch_size(const kt_decoder_layer *layer, int64_t count, int64_t tokens,
                                      const kt_pool *pool) {
  if (!all_fit(layer, count) || !pool) return 0;
  size_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const kt_routed_layer *const routed = layer[i].routed;
    const size_t attention = kt_attention_layer_scratch_size(layer[i].attention, tokens);
    const size_t experts = kt_moe_scratch_size(routed->moe, 1, routed->router.top_k, pool);
    if (!attention || !experts) return 0;
    const size_t size = attention > experts ? attention : experts;
    largest = size > largest ? size : largest;
  }
  return largest;
}

kt_status kt_decoder_layers_run(const kt_decoder_layer *layer, int64_t count, kt_pool *pool,
                                const kt_attention_step *step, void *y, int64_t *expert_ns,
                                void *scratch, size_t scratch_size) {
  if (!all_fit(layer, count) || !pool || !step || !kt_is_bf16_array(y) || !expert_ns)
    return KT_ERR_ARGUMENT;
  const int64_t hidden = hidden_of(layer[0].attention);
  uint16_t *const outputs = y;
  kt_status status = KT_OK;
  *expert_ns = 0;
  for (int64_t i = 0; i < count && !status; i++) {
    kt_attention_step one = step[i];
    if (i > 0) one.x = outputs + (i - 1) * hidden;
    status = kt_attention_layer_run(layer[i].attention, pool, &one, scratch, scratch_size);
    if (!status)
      status = route(layer[i].routed, pool, one.normed, one.h, outputs + i * hidden, expert_ns,
                     scratch, scratch_size);
  }
  return status;
}
