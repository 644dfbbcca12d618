"""The request of `ktconv plan`, and what can be refused before a model is opened."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Literal

from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.source.model_source import ModelSource

PlacementName = Literal["linear", "round_robin", "balanced"]
_HOT = re.compile(r"([0-9]{1,9})|([0-9]{1,3}(?:\.[0-9]{1,9})?)%")


class PlanRequest(Struct, frozen=True):
    """The options of `ktconv plan`."""

    model: ModelSource | str  # a checkpoint, or an output of quantize-cpu
    ep: int = 1  # groups of GPUs, each of which has whole experts
    tp: int = 1  # GPUs of a group, each of which has a part of them
    placement: PlacementName | None = None  # None: linear, with copies balanced
    redundant: int = 0
    nodes: int = 1
    load: Path | None = None
    gpu_memory: int | None = None  # bytes for weights on each GPU
    hot: str | None = None  # "20%" or "640"
    per_layer: bool = False
    method: str | None = None  # weight format on CPUs; None: int4
    numa: int = 0  # 0: one part for each node of this machine
    write: Path | None = None
    plot: Path | None = None

    @property
    def source(self) -> ModelSource:
        """The model with the options about reading it."""
        return ModelSource.of(self.model)

    @property
    def placed(self) -> PlacementName:
        return self.placement or ("balanced" if self.redundant or self.nodes > 1 else "linear")

    @property
    def splits(self) -> bool:
        """Whether some experts stay on the CPU."""
        return self.hot is not None or self.gpu_memory is not None


class Hot(Struct, frozen=True):
    """Number of experts that run on GPUs, or their share of those that there are."""

    number: int | None
    share: Fraction | None = None

    def of(self, experts: int) -> int:
        """Number of hot ones among these experts; a share is rounded down."""
        if self.share is not None:
            return int(self.share * experts)
        assert self.number is not None
        return min(self.number, experts)


def parse_hot(text: str) -> Hot:
    """A number of experts, or "20%". UsageError for anything else."""
    found = _HOT.fullmatch(text.strip())
    if found is None or (found[2] and Fraction(found[2]) > 100):
        raise UsageError(
            f"--hot {text!r} is neither a number of experts nor a share", "for example 640 or 20%"
        )
    return Hot(int(found[1])) if found[1] else Hot(None, Fraction(found[2]) / 100)


def check(request: PlanRequest) -> None:
    """UsageError for options that contradict one another."""
    balanced = request.placed == "balanced"
    copying = ("--redundant", request.redundant > 0), ("--nodes", request.nodes > 1)
    for option, given in copying:
        if given and not balanced:
            raise UsageError(
                f"{option} is for --placement balanced, not {request.placed}", f"omit {option}"
            )
    if request.ep % request.nodes:
        raise UsageError(
            f"--ep {request.ep} cannot be shared out evenly by --nodes {request.nodes}",
            "use a multiple of the number of nodes",
        )
    if request.hot is not None:
        parse_hot(request.hot)
        if balanced:
            raise UsageError(
                "--placement balanced places all experts, --hot some of them",
                "place hot experts with linear or round_robin",
            )
    chosen = ("--per-layer", request.per_layer), ("--write", request.write is not None)
    for option, given in chosen:
        if given and not request.splits:
            raise UsageError(
                f"{option} needs a choice of experts for GPUs", "add --hot N or --gpu-memory SIZE"
            )
