"""PEFT's names for the experts of a model's layers, by their sizes and an adapter's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.family import Family, Projection
from ktconv.families.names import layer_number
from ktconv.source.adapter.names import (
    ENDS,
    PREFIX,
    LayerNames,
    experts_path,
    source_of,
    words_of,
)
from ktconv.source.adapter.parameters import ExpertParameter
from ktconv.source.safetensors_file import Header
from ktconv.source.types import Checkpoint

Shapes = Mapping[str, Sequence[int]]  # of tensors, by their names

# What parameters with the matrices of all experts are called, in the order that modules have them:
# the module within that of the experts, the parameter, and whether it has gate and up.
_PARAMETERS = (
    ("", "gate_up_proj", True), ("", "up_proj", True), ("", "down_proj", False),
    ("fc1", "weight", True), ("fc2", "weight", False),
    ("input_linear", "weight", True), ("output_linear", "weight", False),
)  # fmt: skip


class LayerSizes(NamedTuple):
    """The experts of a layer of a model, all of them, and what the checkpoint calls them ("" where
    that is not known)."""

    number: int
    source: str
    experts: int
    hidden: int
    intermediate: int
    gated: bool
    spare: int = 0  # experts without weights that LongCat's gate_up has, too
    inputs_first: bool | None = None  # how parameters have the matrices; None: not known

    def matrix(self, projection: Projection) -> tuple[int, int]:
        """[outputs, inputs]"""
        if projection == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden


def sizes_of_checkpoint(checkpoint: Checkpoint) -> dict[int, LayerSizes]:
    """Sizes of each layer with experts."""
    found = {}
    for layer in checkpoint.layers:
        up = layer.experts[0]["up"]
        found[layer.index] = LayerSizes(
            layer.index,
            layer.source,
            len(layer.experts),
            layer.hidden_size,
            layer.intermediate_size,
            layer.gated,
            checkpoint.config.checked.zero_experts or 0,
            up.col_stride != 1 and up.row_stride == 1,
        )
    return found


def layer_names(
    layers: Mapping[int, LayerSizes],
    family: Family | None,
    headers: Iterable[Header],
    whole: bool = True,
) -> dict[int, LayerNames]:
    """PEFT's names for each layer, with the parameters that the adapter's tensors may be of.

    Unless these are the `whole` model's layers, those that the adapter has besides get names, too.
    CheckpointError for parameters whose order is not known and cannot be told by shapes.
    """
    shapes: dict[int, dict[str, dict[str, Sequence[int]]]] = {}  # by layer, path and name
    indices = set(layers)
    for tensor in (tensor for header in headers for tensor in header.tensors):
        number = layer_number(f"{tensor.name}.")
        if number is None:
            continue
        if not whole:
            indices.add(number)
        path = experts_path(tensor.name)
        if path is not None and len(tensor.shape) == 2:
            shapes.setdefault(number, {}).setdefault(path, {})[tensor.name] = tensor.shape
    some, found = next(iter(layers.values())), {}
    for index in sorted(indices):
        layer = layers.get(index, some._replace(number=index, source=""))
        paths = shapes.get(index, {})
        inside = (one for one in paths if one.rpartition(".")[2] in table.FAMILIES.containers)
        usual = layer.source or f"model.layers.{index}.mlp.experts"
        path = next(inside, next(iter(paths), usual))
        source = (layer.source or path) if family is None else source_of(path, index, family)
        parameters = _parameters(family, layer, path, paths.get(path, {}))
        found[index] = LayerNames(index, source, path, words_of(family), parameters)
    return found


def _parameters(
    family: Family | None, layer: LayerSizes, path: str, shapes: Shapes
) -> list[ExpertParameter]:
    """The parameters of a layer in transformers that tensors of these shapes may be of."""
    if not shapes:
        return []
    within = {name.removeprefix(f"{PREFIX}{path}.").partition(".")[0] for name in shapes}
    both: tuple[Projection, ...] = ("gate", "up") if layer.gated else ("up",)
    down: tuple[Projection, ...] = ("down",)
    swapped = _is_swapped(layer, path, shapes, len(both))
    other = "up_proj" if layer.gated else "gate_up_proj"  # which these experts do not have
    return [
        ExpertParameter(
            module,
            name,
            layer.experts + layer.spare if first else layer.experts,
            both if first else down,
            alternating=first
            and family is not None
            and family.interleaved
            and name in family.gate_up,
            inputs_first=swapped,
            marked=False,
        )
        for module, name, first in _PARAMETERS
        if name != other and (not module or module in within)
    ]


def _is_swapped(layer: LayerSizes, path: str, shapes: Shapes, wide: int) -> bool:
    """Whether PEFT has taken outputs of the parameters for inputs: by the shapes of A and B, and
    where both are possible, by how the model stores the matrices. CheckpointError where that is not
    known."""
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
    if fits and layer.inputs_first is None:
        raise CheckpointError(
            f"the adapter's matrices of {path.removeprefix(PREFIX)} fit its parameters in both "
            "orders, as its sizes are alike",
            "save the adapter with a matrix for each expert: ktconv.train.load it, and save it",
        )
    return bool(layer.inputs_first)
