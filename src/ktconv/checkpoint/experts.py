"""From one stack of tensors to one layer of experts, with every tensor accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice

from ktconv.checkpoint.config import ModelConfig, Setting
from ktconv.checkpoint.encodings import choose_encoding
from ktconv.checkpoint.encodings.base import Encoding, Parts
from ktconv.checkpoint.fused import StoredWeight, fused_layout, fused_parts
from ktconv.checkpoint.stacks import Stack
from ktconv.checkpoint.types import ExpertMatrix, MoELayer, Quantization, TensorRef
from ktconv.checkpoint.views import StoredView
from ktconv.errors import CheckpointError
from ktconv.families import table
from ktconv.families.family import PROJECTIONS, Matrices, Projection
from ktconv.families.names import known_spellings

_NUMBER = re.compile("[0-9]{1,6}")
_SHOWN = 8  # experts that an error lists
_INCOMPLETE = "Download the checkpoint again; incomplete layers are not converted."
_CONTRADICTION = "Check that config.json and the weights belong to one checkpoint."

# Expert id -> projection -> part name -> tensor.
_Found = dict[int, dict[Projection, dict[str, TensorRef]]]
# Number of experts, and by expert id the parts and the views of its projections.
_Contents = tuple[
    int,
    Callable[[int], Mapping[Projection, Parts]],
    Callable[[int], Mapping[Projection, StoredView]],
]


def build_layer(stack: Stack, index: int, is_mtp: bool, config: ModelConfig) -> MoELayer:
    """The MoE layer in `stack`.

    Raises CheckpointError naming the tensor for anything missing, left over, of an
    unsupported encoding, or of a shape that the config or the other experts contradict.
    """
    numbered = any(rest[0].isdecimal() for rest in stack.tensors if rest)
    count, parts, views = (_numbered if numbered else _fused)(stack, config)
    encodings = _EncodingOfLayer(config)
    experts = []
    for expert in range(count):
        of, where = parts(expert), views(expert)
        experts.append({p: encodings.matrix(of[p], where[p]) for p in PROJECTIONS})
    gate = experts[0]["gate"]
    return MoELayer(
        index, stack.source, is_mtp, gate.cols, gate.rows, encodings.name, tuple(experts)
    )


def _numbered(stack: Stack, config: ModelConfig) -> _Contents:
    found = _group_by_expert(stack)
    _check_complete(stack, found, config.num_experts)
    views = _plain_views(stack, found, config)
    return len(found), found.__getitem__, lambda expert: views


def _group_by_expert(stack: Stack) -> _Found:
    found: _Found = {}
    projections = table.FAMILIES.projections
    for rest, tensor in stack.tensors.items():
        number, _, tail = rest.partition(".")
        name, _, part = tail.partition(".")
        projection = projections.get(name)
        if projection is None or not part or not _NUMBER.fullmatch(number):
            raise CheckpointError(
                f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}) is not a known tensor of "
                "numbered experts",
                f"Known are {known_spellings()} with .weight.",
            )
        parts = found.setdefault(int(number), {}).setdefault(projection, {})
        if part in parts:
            raise CheckpointError(
                f"{parts[part].name} and {tensor.name} are the same weight under two names",
                "Remove one of them from the checkpoint.",
            )
        parts[part] = tensor
    return found


def _check_complete(stack: Stack, found: _Found, count: Setting | None) -> None:
    """Experts 0 .. count-1 are there, each with three projections, and no other."""
    highest = max(found)
    if count is not None and highest >= count.value:
        surplus = next(iter(next(iter(found[highest].values())).values()))
        raise CheckpointError(
            f"{surplus.name} is expert {highest}, but config.json has {count.key} {count.value}",
            _CONTRADICTION,
        )
    expected = count.value if count is not None else highest + 1
    for expert in range(expected):
        projections = found.get(expert, {})
        if len(projections) != len(PROJECTIONS):
            spelt = _spelling(stack)
            absent = next(spelt.of(one) for one in PROJECTIONS if one not in projections)
            raise CheckpointError(
                f"{stack.source}.{expert}.{absent}.weight is missing"
                + _missing_experts(found, expected),
                _INCOMPLETE,
            )


def _missing_experts(found: _Found, expected: int) -> str:
    missing = list(islice((e for e in range(expected) if e not in found), _SHOWN + 1))
    if not missing:
        return ""
    listed = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
    return f": the layer has no expert {listed} of 0-{expected - 1}"


def _spelling(stack: Stack) -> Matrices:
    """How this stack names its projections, so that an error names the key to look for."""
    names = {rest.split(".")[1] for rest in stack.tensors}
    return next(one for one in table.FAMILIES.matrices if names & one.projections.keys())


def _plain_views(
    stack: Stack, found: _Found, config: ModelConfig
) -> Mapping[Projection, StoredView]:
    """Views of [I, H] gate and up and [H, I] down; sizes from the config, else expert 0."""
    parts = found[0]["gate"]
    encoding = choose_encoding(parts)
    weight = parts[encoding.primary]
    # A weight that is not 2-D will be refused by name for its shape.
    shape = encoding.sizes(weight, encoding.transposed) if len(weight.shape) == 2 else (0, 0)
    outputs, inputs = reversed(shape) if encoding.transposed else shape
    inner = config.intermediate_size.value if config.intermediate_size else outputs
    hidden = config.hidden_size.value if config.hidden_size else inputs

    def view(rows: int, cols: int) -> StoredView:
        if encoding.transposed:
            return StoredView(cols, rows, rows, cols, transposed=True)
        return StoredView(rows, cols, rows, cols)

    return {"gate": view(inner, hidden), "up": view(inner, hidden), "down": view(hidden, inner)}


def _fused(stack: Stack, config: ModelConfig) -> _Contents:
    gate_up, down = fused_parts(stack)
    weight = _stored(gate_up)
    layout, name = fused_layout(weight, _stored(down), config), weight.tensor.name
    _check_size(name, "expert count", layout.experts, config.num_experts)
    _check_size(name, "hidden size", layout.hidden, config.hidden_size)
    _check_size(name, "intermediate size", layout.intermediate, config.intermediate_size)
    parts: Mapping[Projection, Parts] = {"gate": gate_up, "up": gate_up, "down": down}
    return layout.experts, lambda expert: parts, layout.views


def _stored(parts: Parts) -> StoredWeight:
    """The primary tensor of a fused weight; packed weights are rejected first, because their
    shapes mislead."""
    encoding = choose_encoding(parts)
    return StoredWeight(parts[encoding.primary], encoding)


def _check_size(name: str, what: str, found: int, setting: Setting | None) -> None:
    if setting is not None and setting.value != found:
        raise CheckpointError(
            f"{name} has {what} {found}, but config.json has {setting.key} {setting.value}",
            _CONTRADICTION,
        )


class _EncodingOfLayer:
    """Makes the matrices of one layer and checks that all have one encoding."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._first: tuple[Encoding, TensorRef] | None = None

    @property
    def name(self) -> str:
        assert self._first is not None, "a layer has at least one expert"
        return self._first[0].name

    def matrix(self, parts: Parts, view: StoredView) -> ExpertMatrix:
        encoding = choose_encoding(parts)
        weight = parts[encoding.primary]
        if self._first is None:
            self._first = (encoding, weight)
            if encoding.check is not None:
                encoding.check(weight, self._config)
        elif encoding is not self._first[0]:
            raise CheckpointError(
                f"{weight.name} is {encoding.name}, but {self._first[1].name} of the same layer "
                f"is {self._first[0].name}",
                "All experts of a layer must have one encoding.",
            )
        expected = view.shape(encoding.element)
        if weight.shape != expected:
            raise self._wrong_shape(weight, expected)
        quantization: Quantization | None = None
        if encoding.quantization is not None:
            quantization = encoding.quantization(parts, view, self._config)
        return view.matrix(weight, encoding.element, quantization)

    def _wrong_shape(self, weight: TensorRef, expected: tuple[int, ...]) -> CheckpointError:
        known = [
            f"{setting.key} {setting.value}"
            for setting in (self._config.hidden_size, self._config.intermediate_size)
            if setting is not None
        ]
        reason = f"config.json has {' and '.join(known)}" if known else "as in the other experts"
        return CheckpointError(
            f"{weight.name} has shape {list(weight.shape)}, expected {list(expected)}: {reason}",
            _CONTRADICTION,
        )
