"""Routers to call: from the logits of tokens to their experts and weights.

    from ktconv.runtime import route

    weights, ids = route.softmax(logits, k=8)
    weights, ids = route.sigmoid(logits, k=8, bias=bias, groups=8, keep=4, scale=2.5)

Logits [M, E] are float32, bf16 or fp16, NumPy arrays (uint16: bits of bf16) or torch tensors on the
CPU; weights float32 and ids int64, both [M, K], are of the same kind. Ids are best first, all
different; of two equal scores the lower expert is chosen. A token with a NaN among its logits gets
weights that are all NaN. Every step is kt_choose_experts' (ktconv.h), of which the routers of all
families consist: docs/routers.md.
"""

from ktconv.runtime.route.scores import (
    ScoredRouter,
    by_spec,
    grouped,
    sigmoid,
    softmax,
    sqrtsoftplus,
)
from ktconv.runtime.route.weights import identity_experts, weight_on_input

__all__ = [
    "ScoredRouter",
    "by_spec",
    "grouped",
    "identity_experts",
    "sigmoid",
    "softmax",
    "sqrtsoftplus",
    "weight_on_input",
]
