"""Adapters in directories, read for layers to call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Family, Projection
from ktconv.native import LoraPair
from ktconv.runtime.adapters import LayerAdapter, check_name, packed_pair
from ktconv.runtime.layers.load import ConvertedModel
from ktconv.source import Checkpoint
from ktconv.source.adapter.config import AdapterConfig
from ktconv.source.adapter.files import Adapter, LowRank, headers_of
from ktconv.source.adapter.layers import LayerSizes, layer_names, sizes_of_checkpoint
from ktconv.source.adapter.names import (
    LayerNames,
    module_of,
)

_SHOWN = 3  # modules that a warning names
_MATRICES: tuple[Projection, ...] = ("gate", "up", "down")


class ModelSizes(NamedTuple):
    """The layers with experts of a model, or one of them alone, and its family, where known."""

    layers: Mapping[int, LayerSizes]
    family: Family | None
    whole: bool = True


def sizes_of(source: ConvertedModel | Checkpoint, layer: int | None = None) -> ModelSizes:
    """Sizes of what was opened. `layer`: all that is opened of it."""
    family = source.config.family
    if isinstance(source, Checkpoint):
        return ModelSizes(sizes_of_checkpoint(source), family, layer is None)
    spare = 0
    with suppress(CheckpointError):  # faults of config.json are reported where it is used
        spare = source.config.checked.zero_experts if source.config else 0
    found = {}
    for number in source.layers:
        one = source.packed.geometry(number)
        sizes = one.experts, one.hidden, one.intermediate, one.gated
        found[number] = LayerSizes(number, "", *sizes, spare)
    return ModelSizes(found, family, layer is None)


def by_name(adapters: Mapping[str, str | Path]) -> dict[str, str | Path]:
    """Directories of adapters by name. UsageError for anything else."""
    if not isinstance(adapters, Mapping):
        raise UsageError(
            f"adapters must be directories by name, not {adapters!r:.60}",
            "give {name: directory}",
        )
    for name, directory in adapters.items():
        check_name(name)
        if not isinstance(directory, str | Path):
            raise UsageError(f"the adapter {name!r:.60} must be a directory, not {directory!r:.60}")
    return dict(adapters)


class AdapterDirectory:
    """An adapter of PEFT or KTransformers in a directory, opened for the layers of a model.

    Raises CheckpointError for files that are missing, damaged, of another model or of more than
    LoRA, UsageError for an `alpha` that contradicts them or that no file has.
    """

    def __init__(
        self,
        directory: str | Path,
        model: ModelSizes,
        alpha: float | None = None,
        lora_b_layout: str | None = None,
        names: Mapping[int, LayerNames] | None = None,
    ) -> None:
        """`names`: PEFT's for each layer, where a model in memory has them."""
        self.directory, self._model = Path(directory), model
        config = AdapterConfig(self.directory, alpha)
        config.check_products()
        headers = headers_of(self.directory)
        names = names or layer_names(model.layers, model.family, headers, model.whole)
        self._adapter = Adapter(
            self.directory, names, lora_b_layout=lora_b_layout, opened=(config, headers)
        )
        if not self._adapter.projections:
            raise CheckpointError(
                f"{self.directory} has no LoRA of experts",
                "apply it to the model's other parts with PEFT",
            )

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Modules other than experts that the adapter has LoRA of."""
        found = (module_of(name) for name in self._adapter.others)
        rest = (name for name in self._adapter.others if module_of(name) is None)
        return tuple(sorted({*(one[0] for one in found if one), *rest}))

    def warn_of_others(self) -> None:
        """Warns of parts that layers of experts cannot have."""
        if self.others:
            more = len(self.others) - _SHOWN
            modules = ", ".join(self.others[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
            warnings.warn(
                f"{self.directory} has LoRA of {modules}, which are no routed experts"
                + ": a MoELayer has none of it, ktconv.model.add_adapters applies all to a model",
                stacklevel=4,
            )

    def linear(self, module: str, shape: tuple[int, int]) -> LowRank:
        """LoRA of one of `others`, a linear layer whose weights are [outputs, inputs]."""
        (a, b), scale = self._adapter.other(module, shape)
        return LowRank(self._adapter.values(a), self._adapter.values(b), scale)

    def layer(self, index: int) -> LayerAdapter | None:
        """LoRA of the experts of a layer; None where the adapter has none there.

        CheckpointError for matrices that do not fit the model, a NaN or an infinity."""
        sizes = self._model.layers[index]
        projections = self._adapter.projections.get(index)
        if not projections:
            return None
        if not sizes.gated and "gate" in projections:
            raise CheckpointError(
                f"{self.directory} has LoRA of gate in layer {index}, whose experts have no gate",
                "give the adapter of this model",
            )
        columns = [self._pairs(sizes, one, one in projections) for one in _MATRICES]
        experts = [pairs if any(pairs) else None for pairs in zip(*columns, strict=True)]
        return LayerAdapter(experts, self.others)

    def _pairs(
        self, sizes: LayerSizes, projection: Projection, there: bool
    ) -> Sequence[LoraPair | None]:
        if not there:
            return [None] * sizes.experts
        shape = sizes.matrix(projection)
        found = self._adapter.experts(sizes.number, projection, sizes.experts, shape)
        return [None if one is None else packed_pair(*one) for one in found]


def expect_layer(found: LayerAdapter | None, directory: str | Path, index: int) -> LayerAdapter:
    """UsageError where an adapter has nothing for the one layer that it was asked for."""
    if found is None:
        raise UsageError(
            f"{directory} has no LoRA of the experts in layer {index}",
            "load that layer without it",
        )
    return found
