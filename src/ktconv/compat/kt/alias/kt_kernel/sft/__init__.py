"""`kt_kernel.sft` under the alias: what serves LoRA; the rest raises by name when it is used."""

from __future__ import annotations

from typing import Any

from ktconv.compat.kt import sft_names
from ktconv.compat.kt.sft import SFTWrapper

AMXSFTMoEWrapper = BaseSFTMoEWrapper = SFTWrapper

__all__ = ["AMXSFTMoEWrapper", "BaseSFTMoEWrapper", *sft_names.OFFERED, *sft_names.ABSENT]


def __getattr__(name: str) -> Any:
    """A name of kt_kernel.sft; one that ktconv has otherwise says so when it is used."""
    if name in sft_names.OFFERED:
        return getattr(sft_names, name)
    if name in sft_names.ABSENT:
        return sft_names.ABSENT[name]
    raise AttributeError(f"ktconv has no kt_kernel.sft.{name}")
