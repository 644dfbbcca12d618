"""`import kt_kernel` under the alias: the names of kt_kernel 0.7.2, as ktconv has them."""

from __future__ import annotations

import importlib
import sys

from ktconv.compat.kt.masks import generate_gpu_experts_masks
from ktconv.compat.kt.sft import SFTWrapper as AMXSFTMoEWrapper
from ktconv.compat.kt.variants import CPU_VARIANT, INT8_KERNEL, INT8_LAYOUT
from ktconv.compat.kt.wrapper import KTMoEWrapper

kt_kernel_ext = importlib.import_module("kt_kernel_ext")  # the one that programs import
sys.modules[f"{__name__}.kt_kernel_ext"] = kt_kernel_ext
__cpu_variant__, __int8_kernel__, __int8_weight_layout__ = CPU_VARIANT, INT8_KERNEL, INT8_LAYOUT
__version__ = "0.7.2"  # whose interface this is

__all__ = [
    "AMXSFTMoEWrapper",
    "KTMoEWrapper",
    "__cpu_variant__",
    "__int8_kernel__",
    "__int8_weight_layout__",
    "__version__",
    "generate_gpu_experts_masks",
    "kt_kernel_ext",
]
