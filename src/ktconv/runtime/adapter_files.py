"""Adapters in directories, read for layers to call."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ktconv.errors import CheckpointError, UsageError
from ktconv.families.family import Family, Projection
from ktconv.families.names import layer_number
from ktconv.native import ExpertPairs, LoraPair
from ktconv.runtime.adapters import LayerAdapter, packed_pair
from ktconv.runtime.layers.load import ConvertedModel
from ktconv.source import Checkpoint
from ktconv.source.adapter.config import AdapterConfig
from ktconv.source.adapter.files import Adapter, LowRank, headers_of
from ktconv.source.adapter.names import (
    ENDS,
    PREFIX,
    LayerNames,
    experts_path,
    module_of,
    source_of,
    words_of,
)
from ktconv.source.adapter.parameters import ExpertParameter
from ktconv.source.safetensors_file import Header

_SHOWN = 3  # modules that a warning names
_MATRICES: tuple[Projection, ...] = ("gate", "up", "down")


class LayerSizes(NamedTuple):
    """The experts of a layer of a model, all of them, and what the checkpoint calls them ("" where
    that is not known)."""

    number: int
    source: str
    experts: int
    hidden: int
    intermediate: int
    gated: bool

    def matrix(self, projection: Projection) -> tuple[int, int]:
        """[outputs, inputs]"""
        if projection == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden


class ModelSizes(NamedTuple):
    """The layers with experts of a model, or one of them alone, and its family, where known."""

    layers: Mapping[int, LayerSizes]
    family: Family | None
    whole: bool = True


def sizes_of(source: ConvertedModel | Checkpoint, layer: int | None = None) -> ModelSizes:
    """Sizes of what was opened. `layer`: all that is opened of it."""
    found: Iterable[LayerSizes]
    if isinstance(source, Checkpoint):
        found = (
            LayerSizes(one.index, one.source, len(one.experts), one.hidden_size,
                       one.intermediate_size, one.gated)
            for one in source.layers
        )  # fmt: skip
    else:
        geometries = ((number, source.packed.geometry(number)) for number in source.layers)
        found = (
            LayerSizes(number, "", one.experts, one.hidden, one.intermediate, one.gated)
            for number, one in geometries
        )
    return ModelSizes({one.number: one for one in found}, source.config.family, layer is None)


class AdapterDirectory:
    """An adapter of PEFT or KTransformers in a directory, opened for the layers of a model.

    Raises CheckpointError for files that are missing, damaged or of another model, UsageError for
    an `alpha` that contradicts them or that no file has.
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
        headers = headers_of(self.directory)
        names = names or _layer_names(model, config, headers)
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
        experts: list[ExpertPairs | None] = list(zip(*columns, strict=True))
        return LayerAdapter(experts, self.others)

    def _pairs(
        self, sizes: LayerSizes, projection: Projection, there: bool
    ) -> Sequence[LoraPair | None]:
        if not there:
            return [None] * sizes.experts
        shape = sizes.matrix(projection)
        found = self._adapter.experts(sizes.number, projection, sizes.experts, shape)
        return [packed_pair(*one) for one in found]


def expect_layer(found: LayerAdapter | None, directory: str | Path, index: int) -> LayerAdapter:
    """UsageError where an adapter has nothing for the one layer that it was asked for."""
    if found is None:
        raise UsageError(
            f"{directory} has no LoRA of the experts in layer {index}",
            "load that layer without it",
        )
    return found


# ---- names -------------------------------------------------------------------------------


def _layer_names(
    model: ModelSizes, config: AdapterConfig, headers: Sequence[Header]
) -> dict[int, LayerNames]:
    """PEFT's names for each layer. Where only one layer was opened, those of the others are taken
    from the adapter itself."""
    paths: dict[int, str] = {}
    shapes: dict[int, dict[str, Sequence[int]]] = {}
    indices = set(model.layers)
    for tensor in (tensor for header in headers for tensor in header.tensors):
        number = layer_number(f"{tensor.name}.")
        if number is None:
            continue
        if not model.whole:
            indices.add(number)
        path = experts_path(tensor.name)
        if path is not None and len(tensor.shape) == 2:
            paths.setdefault(number, path)
            shapes.setdefault(number, {})[tensor.name] = tensor.shape
    some = next(iter(model.layers.values()))
    found = {}
    for index in sorted(indices):
        layer = model.layers.get(index, some._replace(number=index, source=""))
        path = paths.get(index) or layer.source or f"model.layers.{index}.mlp.experts"
        source = path if model.family is None else source_of(path, index, model.family)
        parameters = _parameters(model.family, layer, path, shapes.get(index, {}))
        found[index] = LayerNames(index, source, path, words_of(model.family), parameters)
    return found


def _parameters(
    family: Family | None, layer: LayerSizes, path: str, shapes: Mapping[str, Sequence[int]]
) -> list[ExpertParameter]:
    """The parameters with the matrices of all experts that tensors of these shapes may be of."""
    if not shapes:
        return []
    first = "gate_up_proj" if layer.gated else "up_proj"
    both: tuple[Projection, ...] = ("gate", "up") if layer.gated else ("up",)
    alternating = family is not None and family.interleaved and first in family.gate_up
    swapped = _is_swapped(layer, path, shapes, len(both))
    return [
        ExpertParameter("", first, layer.experts, both, alternating, swapped, False),
        ExpertParameter("", "down_proj", layer.experts, ("down",), False, swapped, False),
    ]


def _is_swapped(
    layer: LayerSizes, path: str, shapes: Mapping[str, Sequence[int]], wide: int
) -> bool:
    """Whether PEFT has taken outputs of the parameters for inputs, by the shapes of A and B.
    CheckpointError where those of all parameters allow both."""
    hidden, inner = layer.hidden, layer.intermediate
    straight = {(hidden, wide * inner), (inner, hidden)}
    fits = False
    for name, shape in shapes.items():
        other = shapes.get(name.removesuffix(ENDS["a"]) + ENDS["b"])
        if not name.endswith(ENDS["a"]) or other is None:
            continue
        pair = shape[1], other[0]
        if (pair in straight) != (pair[::-1] in straight):
            return pair not in straight
        fits |= pair in straight
    if fits:
        raise CheckpointError(
            f"the adapter's matrices of {path.removeprefix(PREFIX)} fit its parameters in both "
            "orders, as its sizes are alike",
            "save the adapter with a matrix for each expert: ktconv.train.load it, and save it",
        )
    return False
