"""The request of `verify`: what to verify, and how thoroughly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, field

from ktconv.errors import UsageError
from ktconv.source.model_source import ModelSource, source_or_none

LEVELS = ("structure", "weights", "layers", "model")


class Thresholds(Struct, frozen=True):
    """Limits of level model; None: the method's default."""

    max_ppl_increase: float | None = None  # relative: 0.02 is 2 %
    max_kl: float | None = None  # mean, in nats


class VerifyRequest(Struct, frozen=True):
    """An output and the checks to run on it. Without a source only level structure is possible."""

    output: Path
    source: ModelSource | str | None = None  # its map and tower: those of the manifest, if none
    level: str | None = None  # None: layers, or structure without a source
    sample: float = 1.0  # fraction of experts and of other tensors that is read
    seed: int = 0
    threads: int | None = None
    tokens: int = 16  # of level layers, per layer
    gradients: bool = False  # at level layers, those of LoRA too
    text: Path | None = None  # None: the text that ships with ktconv
    windows: int = 40  # of 512 tokens, of level model
    beside: Path | None = None  # the output that must have all other experts
    tp: Sequence[int] | None = None  # required tensor-parallel sizes
    ep: Sequence[int] | None = None  # required expert-parallel sizes
    thresholds: Thresholds = field(default_factory=Thresholds)
    max_memory: int | None = None  # bytes in all; None: 1.5 GiB beyond what headers take
    importance: Path | None = None  # the file of it that the output was converted with
    calibrate: Path | None = None  # second moments, likewise
    work_dir: Path | None = None  # of hidden states; None: in the user's cache

    @property
    def original(self) -> ModelSource | None:
        """The source with the options about reading it."""
        return source_or_none(self.source)


def check_sample(sample: float) -> None:
    if not 0 < sample <= 1:
        raise UsageError(f"--sample must be in (0, 1], got {sample:g}", "for example 0.1")
