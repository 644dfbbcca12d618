"""One MoE layer on the C kernels: weights of any method, forward, and the readable truth."""

from ktconv.moe.experts import Experts, pack_experts
from ktconv.moe.load import experts_per_token, open_experts
from ktconv.moe.methods import KERNEL_BOUND, METHODS, Method, method_named

__all__ = [
    "KERNEL_BOUND",
    "METHODS",
    "Experts",
    "Method",
    "experts_per_token",
    "method_named",
    "open_experts",
    "pack_experts",
]
