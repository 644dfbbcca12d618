"""`import kt_kernel_ext` under the alias: queues, and layers by addresses."""

from __future__ import annotations

import sys
from typing import Any

from ktconv.compat.kt import moe
from ktconv.compat.kt.cpu_infer import CPUInfer, WorkerPoolConfig
from ktconv.compat.kt.variants import FACTS

__all__ = ["CPUInfer", "WorkerPoolConfig", "moe"]

sys.modules[f"{__name__}.moe"] = moe


def __getattr__(name: str) -> Any:
    """A fact about the kernels; AttributeError for what is not here."""
    if name in FACTS:
        return FACTS[name]
    raise AttributeError(f"ktconv has no kt_kernel_ext.{name}")
