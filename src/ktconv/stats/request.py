"""The options of `ktconv stats`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_TOKENS = 20480  # 40 windows


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """What to count, how to choose, and what to write."""

    model: str  # a checkpoint, or what an earlier run recorded: .json or .safetensors
    text: Path | None = None  # None: the text that ships with ktconv
    max_tokens: int | None = None
    max_memory: int | None = None  # bytes of weights that are in memory; None: all
    layers: Sequence[int] | None = None
    hot: int | None = None
    hot_share: float | None = None
    hot_total: int | None = None
    write: Path | None = None
    trace: Path | None = None
    placement: Path | None = None

    @property
    def choice(self) -> tuple[int | None, float | None, int | None]:
        """How to choose, as `Statistics.chosen` takes it."""
        return self.hot, self.hot_share, self.hot_total
