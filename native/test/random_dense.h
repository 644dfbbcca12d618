/* random_dense.h - random calls of what models compute outside their experts. */
#ifndef KT_TEST_RANDOM_DENSE_H
#define KT_TEST_RANDOM_DENSE_H

#include "random_layers.h"

static inline void *draw_bf16(int64_t count) { return draw_values(KT_BF16, count, 0); }

static inline int64_t draw_cols(void) {
  static const int64_t cols[] = {1, 2, 31, 32, 33, 64, 95, 128, 200};
  return ONE_OF(cols);
}

static inline kt_linear draw_linear(int64_t rows, int64_t cols) {
  return (kt_linear){.rows = rows,
                     .cols = cols,
                     .weight = seal(draw_bf16(rows * cols)),
                     .bias = one_in(2) ? seal(draw_bf16(rows)) : NULL};
}

static inline kt_norm draw_norm(int64_t cols) {
  return (kt_norm){.cols = cols,
                   .weight = seal(draw_bf16(cols)),
                   .epsilon = one_in(2) ? 0.0f : 1e-5f,
                   .kind = (int32_t)below(3)};
}

static void linear_case(int number) {
  const int64_t rows = 1 + below(100), tokens = number ? below(40) : 0;
  const kt_linear l = draw_linear(rows, draw_cols());
  const void *const x = seal(draw_bf16(tokens * l.cols));
  const size_t size = (size_t)(tokens * rows) * 2;
  snprintf(inputs, sizeof inputs, "%d x %d, %d tokens", (int)rows, (int)l.cols, (int)tokens);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    void *const y = room(size, 2);
    EXPECTED(KT_OK, CALLED(kt_linear_forward, &l, ONE_OF(pools), tokens, x, y));
    compare(&k, 0, "linear", y, size, 0);
    release_rooms(kept_pieces);
  }
  forget(&k);
}

static void elements_case(int number) {
  const int64_t rows = number ? 1 + below(9) : 0, cols = 2 * draw_cols();
  const kt_norm norm = draw_norm(cols);
  const void *const x = seal(draw_bf16(rows * cols));
  const void *const cosine = seal(draw_bf16(cols)), *const sine = seal(draw_bf16(cols));
  const size_t size = (size_t)(rows * cols) * 2;
  snprintf(inputs, sizeof inputs, "%d x %d, norm %d", (int)rows, (int)cols, (int)norm.kind);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    void *const y = room(size, 2), *const turned = room(size, 2);
    if (size) memcpy(y, x, size);
    EXPECTED(KT_OK, CALLED(kt_rms_norm, &norm, rows, one_in(2) ? y : x, y));
    EXPECTED(KT_OK, CALLED(kt_rotate, rows, cols, x, cosine, sine, turned));
    compare(&k, 0, "norm", y, size, 0);
    compare(&k, 1, "rotation", turned, size, 0);
    release_rooms(kept_pieces);
  }
  forget(&k);
}

static void attention_case(int number) {
  const int64_t key_heads = 1 + below(3), each = 1 + below(10);
  const int64_t tokens = number ? 1 + below(700) : 1, room_for = tokens + below(3);
  kt_attention a = {.heads = key_heads * each,
                    .key_heads = key_heads,
                    .cols = draw_cols(),
                    .value_cols = draw_cols(),
                    .tokens = tokens,
                    .scale = 0.25f};
  a.key_token = a.cols, a.value_token = a.value_cols;
  a.key_head = room_for * a.cols, a.value_head = room_for * a.value_cols;
  /* Only what is read is there: the last head ends with its last token. */
  a.keys = seal(draw_bf16((key_heads - 1) * a.key_head + tokens * a.cols));
  a.values = seal(draw_bf16((key_heads - 1) * a.value_head + tokens * a.value_cols));
  a.queries = seal(draw_bf16(a.heads * a.cols));
  const size_t size = (size_t)(a.heads * a.value_cols) * 2;
  const size_t scratch_size = kt_attention_scratch_size(&a);
  counted(OF_kt_attention_scratch_size, scratch_size > 0);
  snprintf(inputs, sizeof inputs, "%d heads of %d, %d and %d columns, %d tokens", (int)a.heads,
           (int)key_heads, (int)a.cols, (int)a.value_cols, (int)tokens);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    a.y = room(size, 2);
    EXPECTED(KT_OK, CALLED(kt_attend, &a, ONE_OF(pools), room(scratch_size, 4), scratch_size));
    compare(&k, 0, "attention", a.y, size, 0);
    release_rooms(kept_pieces);
  }
  EXPECTED(KT_ERR_SCRATCH,
           CALLED(kt_attend, &a, pools[0], room(scratch_size, 4), scratch_size - 1));
  forget(&k);
}

static inline kt_attention_layer draw_attention(int64_t hidden) {
  const int64_t cols = 2 * draw_cols(), key_heads = 1 + below(3);
  const int64_t heads = key_heads * (1 + below(4)), keys = key_heads * cols;
  kt_attention_layer l = {.before = draw_norm(hidden), .after = draw_norm(hidden)};
  l.projection[0] = draw_linear(heads * cols, hidden);
  l.projection[1] = draw_linear(keys, hidden), l.projection[2] = draw_linear(keys, hidden);
  l.out = draw_linear(hidden, heads * cols);
  l.key_heads = key_heads, l.cols = cols, l.scale = 0.1f;
  if (one_in(2)) l.query_norm = draw_norm(cols), l.key_norm = draw_norm(one_in(2) ? cols : keys);
  return l;
}

static inline kt_attention_step draw_step(const kt_attention_layer *l, int64_t tokens) {
  return (kt_attention_step){.x = seal(draw_bf16(l->out.rows)),
                             .cosine = seal(draw_bf16(l->cols)),
                             .sine = seal(draw_bf16(l->cols)),
                             .tokens = tokens,
                             .room = tokens + 1 + below(2)};
}

/* Bytes of keys, or of values. */
static inline size_t cache_size(const kt_attention_layer *l, const kt_attention_step *s) {
  return (size_t)(l->key_heads * l->cols * s->room) * 2;
}

static void decoder_layer_case(int number) {
  const int64_t hidden = draw_cols();
  const kt_attention_layer l = draw_attention(hidden);
  const int64_t keys = l.key_heads * l.cols;
  kt_attention_step s = draw_step(&l, number ? below(300) : 0);
  const size_t cache = cache_size(&l, &s), size = (size_t)hidden * 2;
  const void *const before = seal(draw_bf16(keys * s.room));
  const size_t scratch_size = kt_attention_layer_scratch_size(&l, s.tokens);
  counted(OF_kt_attention_layer_scratch_size, scratch_size > 0);
  snprintf(inputs, sizeof inputs, "hidden %d, %d heads of %d, %d columns, %d tokens", (int)hidden,
           (int)(l.projection[0].rows / l.cols), (int)l.key_heads, (int)l.cols, (int)s.tokens);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    s.keys = memcpy(room(cache, 2), before, cache);
    s.values = memcpy(room(cache, 2), before, cache);
    s.h = room(size, 2), s.normed = room(size, 2);
    EXPECTED(KT_OK, CALLED(kt_attention_layer_run, &l, ONE_OF(pools), &s, room(scratch_size, 64),
                           scratch_size));
    compare(&k, 0, "h", s.h, size, 0);
    compare(&k, 1, "normed", s.normed, size, 0);
    compare(&k, 2, "keys", s.keys, cache, 0);
    compare(&k, 3, "values", s.values, cache, 0);
    release_rooms(kept_pieces);
  }
  s.tokens = s.room;
  REFUSED_CALL(CALLED(kt_attention_layer_run, &l, pools[0], &s, room(64, 64), 64));
  forget(&k);
}

/* Experts whose kernels compute integers: the same bits on every level. */
static inline layer draw_integers(int number) {
  int format = 0;
  while (layouts[format].format != (number % 2 ? KT_FORMAT_INT8 : KT_FORMAT_INT4)) format++;
  whole = 1;
  const layer l = draw_layer(format, 0);
  whole = 0;
  return l;
}

static inline kt_routed_layer draw_routed(const kt_moe *moe) {
  return (kt_routed_layer){.gate = draw_linear(moe->experts, moe->hidden),
                           .router = {.experts = moe->experts,
                                      .top_k = 1 + below(moe->experts),
                                      .groups = 1,
                                      .keep = 1,
                                      .group_score = 1,
                                      .renormalise = one_in(2),
                                      .jitter = -1.0f,
                                      .p_norm = 1.0f,
                                      .factor = 1.0f},
                           .moe = moe,
                           .rounded = one_in(2)};
}

static void routed_layer_case(int number) {
  const layer l = draw_integers(number);
  const int64_t hidden = l.moe.hidden;
  const kt_routed_layer r = draw_routed(&l.moe);
  const void *const normed = seal(draw_bf16(hidden)), *const h = seal(draw_bf16(hidden));
  const size_t size = (size_t)hidden * 2;
  seal(l.expert);
  snprintf(inputs, sizeof inputs, "hidden %d, %d of %d experts", (int)hidden, (int)r.router.top_k,
           (int)l.moe.experts);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    kt_pool *const pool = ONE_OF(pools);
    const size_t scratch_size = kt_moe_scratch_size(&l.moe, 1, r.router.top_k, pool);
    void *const y = room(size, 2);
    EXPECTED(KT_OK, CALLED(kt_routed_layer_run, &r, pool, normed, h, y, room(scratch_size, 64),
                           scratch_size));
    compare(&k, 0, "routed", y, size, 0);
    release_rooms(kept_pieces);
  }
  forget(&k);
}

enum { MOST_DECODERS = 3 };

/* Keys and values of each step, as they were before. */
static inline void give_caches(const kt_decoder_layer *d, int64_t count, kt_attention_step *s,
                               const void *const *before) {
  for (int64_t i = 0; i < count; i++) {
    const size_t size = cache_size(d[i].attention, &s[i]);
    s[i].keys = memcpy(room(size, 2), before[i], size);
    s[i].values = memcpy(room(size, 2), before[i], size);
  }
}

/* Layers one behind the other in one call, in two calls each: the same bits in all they write. */
static void decoder_layers_case(int number) {
  const layer l = draw_integers(number);
  const int64_t hidden = l.moe.hidden, count = 1 + number / 2 % MOST_DECODERS;
  const size_t size = (size_t)hidden * 2;
  seal(l.expert);
  kt_attention_layer attention[MOST_DECODERS], narrow = draw_attention(1);
  kt_routed_layer routed[MOST_DECODERS];
  kt_decoder_layer d[MOST_DECODERS];
  kt_attention_step one[MOST_DECODERS], two[MOST_DECODERS];
  const void *before[MOST_DECODERS];
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    attention[i] = draw_attention(hidden), routed[i] = draw_routed(&l.moe);
    d[i] = (kt_decoder_layer){&attention[i], &routed[i]};
    one[i] = draw_step(&attention[i], below(300));
    before[i] = seal(draw_bf16((int64_t)cache_size(&attention[i], &one[i]) / 2));
    most = one[i].tokens > most ? one[i].tokens : most;
  }
  snprintf(inputs, sizeof inputs, "hidden %d, %d layers, up to %d tokens", (int)hidden, (int)count,
           (int)most);
  kept k = {0};
  const int kept_pieces = piece_count;
  for (int i = 0; i < level_count; i++) {
    use_level(i);
    kt_pool *const pool = ONE_OF(pools);
    const size_t scratch_size = kt_decoder_layers_scratch_size(d, count, most, pool);
    counted(OF_kt_decoder_layers_scratch_size, scratch_size > 0);
    void *const y = room(size * (size_t)count, 2), *const scratch = room(scratch_size, 64);
    void *const h = room(size, 2), *const normed = room(size, 2);
    for (int64_t n = 0; n < count; n++) {
      one[n].h = h, one[n].normed = normed;
      two[n] = one[n];
      if (n > 0) one[n].x = NULL;
    }
    give_caches(d, count, one, before);
    give_caches(d, count, two, before);
    int64_t ns = -1;
    EXPECTED(KT_OK,
             CALLED(kt_decoder_layers_run, d, count, pool, one, y, &ns, scratch, scratch_size));
    if (ns <= 0) FAILED("experts took %d ns", (int)ns);
    for (int64_t n = 0; n < count; n++) {
      uint8_t *const by_two = room(size, 2);
      if (n > 0) two[n].x = (uint8_t *)y + (size_t)(n - 1) * size;
      EXPECTED(KT_OK, kt_attention_layer_run(d[n].attention, pool, two + n, scratch, scratch_size));
      EXPECTED(KT_OK,
               kt_routed_layer_run(d[n].routed, pool, normed, h, by_two, scratch, scratch_size));
      const size_t cache = cache_size(d[n].attention, &one[n]);
      if (memcmp(by_two, (uint8_t *)y + (size_t)n * size, size) ||
          memcmp(one[n].keys, two[n].keys, cache) || memcmp(one[n].values, two[n].values, cache))
        FAILED("layer %d is not that of two calls", (int)n);
    }
    compare(&k, 0, "outputs", y, size * (size_t)count, 0);
    EXPECTED(KT_ERR_SCRATCH, CALLED(kt_decoder_layers_run, d, count, pool, one, y, &ns, NULL, 0));
    REFUSED_CALL(CALLED(kt_decoder_layers_run, d, 0, pool, one, y, &ns, scratch, scratch_size));
    const kt_decoder_layer odd[] = {d[0], {&narrow, d[0].routed}}, none[] = {d[0], {0}};
    REFUSED_CALL(CALLED(kt_decoder_layers_run, odd, 2, pool, one, y, &ns, scratch, scratch_size));
    REFUSED_CALL(CALLED(kt_decoder_layers_run, none, 2, pool, one, y, &ns, scratch, scratch_size));
    counted(OF_kt_decoder_layers_scratch_size, !kt_decoder_layers_scratch_size(odd, 2, most, pool));
    one[count - 1].tokens = one[count - 1].room;
    REFUSED_CALL(CALLED(kt_decoder_layers_run, d, count, pool, one, y, &ns, scratch, scratch_size));
    one[count - 1].tokens = two[count - 1].tokens;
    release_rooms(kept_pieces);
  }
  forget(&k);
}

static void dense_refusal_case(int number) {
  kt_linear l = draw_linear(4, 32);
  kt_norm norm = draw_norm(32);
  kt_attention a = {.heads = 2, .key_heads = 1, .cols = 4, .value_cols = 4, .tokens = 1};
  uint16_t *const x = draw_bf16(64), *const y = room(128, 2);
  a.queries = a.keys = a.values = x, a.y = y, a.scale = 1.0f;
  kt_pool *pool = pools[0];
  int64_t tokens = 1, cols = 32;
  switch (number) {
  case 0: l.rows = 0, norm.cols = 0, a.heads = 0, cols = 0; break;
  case 1: l.cols = -1, norm.epsilon = -1.0f, a.cols = 1025, cols = 33; break;
  case 2: l.weight = NULL, norm.weight = NULL, a.keys = NULL, tokens = -1; break;
  case 3: l.bias = (const uint8_t *)x + 1, norm.kind = 3, a.scale = NAN, cols = -2; break;
  case 4: pool = NULL, norm.kind = -1, tokens = huge(); break;
  default: l.rows = huge(), norm.cols = huge(), a.tokens = huge(), cols = huge();
  }
  snprintf(inputs, sizeof inputs, "argument %d", number);
  use_level((int)below(level_count));
  REFUSED_CALL(CALLED(kt_linear_forward, &l, pool, 1, x, y));
  REFUSED_CALL(CALLED(kt_rms_norm, &norm, 1, x, y));
  REFUSED_CALL(CALLED(kt_rotate, tokens, cols, x, x, x, y));
  REFUSED_CALL(CALLED(kt_attend, &a, pool, room(64, 64), 64));
  REFUSED_CALL(CALLED(kt_attention_layer_run, NULL, pool, NULL, NULL, 0));
  REFUSED_CALL(CALLED(kt_routed_layer_run, NULL, pool, x, x, y, NULL, 0));
  REFUSED_CALL(CALLED(kt_decoder_layers_run, NULL, 1, pool, NULL, y, NULL, NULL, 0));
}

#endif
