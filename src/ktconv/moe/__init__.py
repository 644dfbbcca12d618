"""One MoE layer on the C kernels: weights of any format, forward, and the readable reference."""

from ktconv.moe.experts import KERNEL_BOUND, Experts, pack_experts
from ktconv.moe.load import experts_per_token, open_experts

__all__ = ["KERNEL_BOUND", "Experts", "experts_per_token", "open_experts", "pack_experts"]
