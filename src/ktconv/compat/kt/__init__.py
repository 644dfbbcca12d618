"""KTransformers' interface for experts on the CPU: a program for `kt_kernel` changes one import.

    from ktconv.compat.kt import KTMoEWrapper, generate_gpu_experts_masks

`python -m ktconv.compat.kt -m MODULE` runs a program in which `import kt_kernel` means ktconv, and
`install()` does so in the process at hand. docs/kt-wrapper.md says where it differs on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ktconv.compat.kt.alias import install

if TYPE_CHECKING:
    from ktconv.compat.kt.masks import generate_gpu_experts_masks
    from ktconv.compat.kt.wrapper import KTMoEWrapper

__all__ = ["KTMoEWrapper", "generate_gpu_experts_masks", "install"]


def __getattr__(name: str) -> Any:
    """The names that need torch, which the launcher does not."""
    if name == "KTMoEWrapper":
        from ktconv.compat.kt.wrapper import KTMoEWrapper

        return KTMoEWrapper
    if name == "generate_gpu_experts_masks":
        from ktconv.compat.kt.masks import generate_gpu_experts_masks

        return generate_gpu_experts_masks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
