/* Brings the pages of a layer's weights into memory: of each part, every thread of its team has
 * neighbouring experts. */
#include "run.h"

enum { PAGE = 4096 };

static void touch_pages(const void *memory, size_t size) {
  const volatile uint8_t *bytes = memory;
  for (size_t i = 0; i < size; i += PAGE) (void)bytes[i];
}

static void touch_job(void *context, int32_t thread) {
  const kt_run *r = context;
  const kt_layout *layout = &r->moe->layout;
  const size_t wide = kt_packed_size(layout, r->width, r->moe->hidden);
  const size_t tall = kt_packed_size(layout, r->moe->hidden, r->width);
  const int gated = kt_has_gate(r->moe->activation.function);
  const int64_t team = kt_team_of(r, thread), count = r->moe->experts;
  const int64_t rank = kt_team_rank(r, thread), threads = kt_team_threads(r, team);
  for (int64_t part = kt_first_part(r, team); part < kt_first_part(r, team + 1); part++)
    for (int64_t e = count * rank / threads; e < count * (rank + 1) / threads; e++) {
      const kt_expert *x = r->moe->expert + part * count + e;
      if (x->gate && gated) touch_pages(x->gate, wide);
      if (x->up) touch_pages(x->up, wide);
      if (x->down) touch_pages(x->down, tall);
    }
}

kt_status kt_moe_touch(const kt_moe *moe, kt_pool *pool) {
  const kt_status status = pool ? kt_check_layer(moe) : KT_ERR_ARGUMENT;
  if (status != KT_OK) return status;
  kt_run r = kt_run_of(moe, pool, 1, 1);
  return kt_pool_run(pool, touch_job, &r);
}
