/* A call of a layer as the work of a task. */
#include "ktconv.h"

#include <math.h>
#include <string.h>

static int64_t id_of(const kt_moe_call *call, int64_t at) {
  return call->id_size == 4 ? ((const int32_t *)call->ids)[at] : ((const int64_t *)call->ids)[at];
}

static float weight_of(const kt_moe_call *call, int64_t at) {
  return id_of(call, at) < 0 ? -INFINITY : call->weights[at];
}

/* How many experts of a token come before one: those of larger weight, and of equal weights those
 * before it. A NaN is the smallest. */
static int64_t place_of(const kt_moe_call *call, int64_t token, int64_t k) {
  const int64_t start = token * call->top_k;
  const float own = weight_of(call, start + k);
  int64_t before = 0;
  for (int64_t other = 0; other < call->top_k; other++) {
    const float weight = weight_of(call, start + other);
    const int equal = weight == own || (isnan(weight) && isnan(own));
    before += equal ? other < k : weight > own || isnan(own);
  }
  return before;
}

static void split(const kt_moe_work *work) {
  const kt_moe_call *call = &work->call;
  for (int64_t token = 0; token < call->tokens; token++)
    for (int64_t k = 0; k < call->top_k; k++) {
      const int64_t at = token * call->top_k + k, id = id_of(call, at);
      const int kept = place_of(call, token, k) < work->keep;
      work->now[at] = kept ? id : -1;
      work->later[at] = kept ? -1 : id;
    }
}

static kt_status forward(const kt_moe_work *work, const kt_moe_call *call) {
  if (work->adapters)
    return kt_adapted_forward(work->moe, work->adapters, work->pool, call, work->scratch,
                              work->scratch_size);
  return kt_moe_forward(work->moe, work->pool, call, work->scratch, work->scratch_size);
}

void kt_moe_work_run(void *argument) {
  kt_moe_work *work = argument;
  kt_moe_call call = work->call;
  if (work->mask) memcpy(work->skip, work->mask, (size_t)work->moe->experts);
  if (work->later) {
    split(work);
    call.ids = work->now;
    call.id_size = sizeof *work->now;
  }
  const kt_status status = forward(work, &call);
  if (status == KT_OK) return;
  const size_t bytes = call.y_dtype == KT_F32 ? 4 : 2;
  memset(call.y, 0xff, (size_t)call.tokens * (size_t)work->moe->hidden * bytes); /* NaN in each */
  if (work->status == KT_OK) work->status = (int32_t)status;
  if (work->failures) __atomic_add_fetch(work->failures, 1, __ATOMIC_RELEASE);
}
