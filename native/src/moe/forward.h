/* forward.h - the forward with and without LoRA, with and without keeping what a backward needs. */
#ifndef KT_FORWARD_H
#define KT_FORWARD_H

#include "ktconv.h"

/* LoRA of a forward: that of fine-tuning, or adapters at inference. NULL: there is none. */
typedef struct kt_low_rank {
  const kt_lora *lora;
  const kt_adapters *adapters;
} kt_low_rank;

/* As kt_train_forward and kt_adapted_forward, of which arguments are checked but those of lora. */
kt_status kt_forward(const kt_moe *moe, kt_low_rank low_rank, kt_pool *pool,
                     const kt_moe_call *call, void *saved, void *scratch, size_t scratch_size);

/* Of what passes kt_check_layer, kt_check_batch, kt_check_lora and kt_check_adapters. */
size_t kt_forward_scratch_size(const kt_moe *moe, kt_low_rank low_rank, int64_t tokens,
                               int64_t top_k, const kt_pool *pool);

#endif
