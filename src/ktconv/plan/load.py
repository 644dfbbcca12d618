"""Load of each expert: counts of `ktconv stats`, held against the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct

from ktconv.errors import UsageError
from ktconv.plan.sizes import Model
from ktconv.stats.counts import Statistics
from ktconv.stats.files import read_statistics
from ktconv.system.arrays import F64
from ktconv.system.units import counted, format_ranges


class Load(Struct, frozen=True):
    """Choices of each expert by layer, [E]; where nothing was counted, all experts are equal."""

    layers: Mapping[int, F64]
    path: Path | None  # of the counts
    tokens: int | None
    text: str | None
    uncounted: tuple[int, ...] = ()  # MTP layers, which `ktconv stats` does not run

    @property
    def words(self) -> str:
        if self.path is None or self.tokens is None:
            return "every expert equally often (give counts with --load)"
        text = "" if self.text is None else f" of {self.text}"
        return f"counts in {self.path}: {counted(self.tokens, 'token')}{text}"


def load_of(model: Model, path: Path | None) -> Load:
    """The counts in `path`, a file of `ktconv stats --json` or `--trace`; None: no counts.

    UsageError for counts of another model, or of a part of the layers.
    """
    if path is None:
        return Load({n: np.ones(count) for n, count in model.experts.items()}, None, None, None)
    if not path.is_file():
        raise UsageError(f"--load {path} is not a file", "make it with: ktconv stats MODEL --json")
    statistics = read_statistics(path)
    for reason in _differences(model, statistics, path):
        raise UsageError(reason, "give the counts of this model")
    counts = {one.layer: one.counts.astype(np.float64) for one in statistics.layers}
    missing = [layer for layer in model.layers if layer.index not in counts]
    if lost := [layer.index for layer in missing if not layer.is_mtp]:
        raise UsageError(
            f"{path} has no counts of layers {format_ranges(lost)}",
            "count all layers: ktconv stats without --layers",
        )
    mean = float(np.concatenate(list(counts.values())).mean())
    layers = {n: counts.get(n, np.full(count, mean)) for n, count in model.experts.items()}
    text, tokens = statistics.about.get("text"), max(one.tokens for one in statistics.layers)
    return Load(
        layers,
        path,
        tokens,
        text if isinstance(text, str) else None,
        tuple(layer.index for layer in missing),
    )


def _differences(model: Model, statistics: Statistics, path: Path) -> Iterator[str]:
    """Reasons why the counts are not those of the model."""
    kind = statistics.about.get("model_type")
    known = set(model.config.model_types)
    names = {one.removesuffix("_text") for one in known if isinstance(one, str)}
    if isinstance(kind, str) and names and kind.removesuffix("_text") not in names:
        yield f"{path} has counts of a model of type {kind}, not {min(names)}"
    for one in statistics.layers:
        if one.layer not in model.experts:
            what = f"layer {one.layer}, which is not an MoE layer of {model.path}"
            yield f"{path} has counts of {what}"
        elif one.experts != model.experts[one.layer]:
            yield (
                f"{path} has counts of {counted(one.experts, 'expert')} of layer {one.layer}, "
                "but it has "
                f"{model.experts[one.layer]}"
            )
