"""KTransformers' interface for experts on the CPU: a program for `kt_kernel` changes one import.

    from ktconv.compat.kt import KTMoEWrapper, generate_gpu_experts_masks

docs/kt-wrapper.md says where it differs on purpose.
"""

from ktconv.compat.kt.masks import generate_gpu_experts_masks
from ktconv.compat.kt.wrapper import KTMoEWrapper

__all__ = ["KTMoEWrapper", "generate_gpu_experts_masks"]
