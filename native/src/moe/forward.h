/* forward.h - the forward with and without LoRA, with and without keeping what a backward needs. */
#ifndef KT_FORWARD_H
#define KT_FORWARD_H

#include "ktconv.h"

/* As kt_train_forward, of which arguments are checked but those of lora. */
kt_status kt_forward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool, const kt_moe_call *call,
                     void *saved, void *scratch, size_t scratch_size);

/* Of what passes kt_check_layer, kt_check_batch and kt_check_lora. */
size_t kt_forward_scratch_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens,
                               int64_t top_k, const kt_pool *pool);

#endif
