"""One MoE layer on the C kernels: weights of any format, forward, and the readable reference."""

from ktconv.runtime.layers.experts import KERNEL_BOUND, Experts, expert_output, pack_experts
from ktconv.runtime.layers.load import experts_per_token, open_experts
from ktconv.runtime.layers.native_load import native_experts, native_formats, open_stored
from ktconv.runtime.layers.online import pack_online

__all__ = [
    "KERNEL_BOUND", "Experts", "expert_output", "experts_per_token", "native_experts",
    "native_formats", "open_experts", "open_stored", "pack_experts", "pack_online",
]  # fmt: skip
