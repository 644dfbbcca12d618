"""One MoE layer on the C kernels: weights of any method, forward, and the readable truth."""

from ktconv.moe.experts import Experts, pack_experts
from ktconv.moe.methods import METHODS, Method, method_named
from ktconv.moe.opened import open_experts

__all__ = ["METHODS", "Experts", "Method", "method_named", "open_experts", "pack_experts"]
