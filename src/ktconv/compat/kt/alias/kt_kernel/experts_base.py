"""`kt_kernel.experts_base` under the alias."""

from ktconv.compat.kt.masks import generate_gpu_experts_masks
from ktconv.compat.kt.wrapper import KTMoEWrapper as BaseMoEWrapper

__all__ = ["BaseMoEWrapper", "generate_gpu_experts_masks"]
