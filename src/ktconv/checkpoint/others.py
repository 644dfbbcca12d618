"""Tensors other than routed experts, as matrices that are read in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import NamedTuple

from ktconv.checkpoint.config import interpret_config
from ktconv.checkpoint.encodings import ENCODINGS, stored_matrix
from ktconv.checkpoint.encodings.base import WEIGHT, Encoding, Parts
from ktconv.checkpoint.types import Checkpoint, ExpertMatrix, TensorRef
from ktconv.checkpoint.views import StoredView
from ktconv.errors import CheckpointError

_PARTS = frozenset(
    name
    for encoding in ENCODINGS
    for name in (
        encoding.primary,
        *(name for companion in encoding.companions for name in companion.names),
        *encoding.ignored,
    )
)
_SUFFIXES = tuple(part.removeprefix(WEIGHT) for part in _PARTS if part.startswith(f"{WEIGHT}_"))
_PRIMARY = tuple(dict.fromkeys(encoding.primary for encoding in ENCODINGS))


class OtherWeight(NamedTuple):
    encoding: str  # its name
    matrix: ExpertMatrix


class OtherWeights:
    """The weights among a checkpoint's other tensors, whatever each consists of."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._config = interpret_config(checkpoint.config)
        self._parts: dict[str, dict[str, TensorRef]] = {}
        names = {tensor.name for tensor in checkpoint.other_tensors}
        for tensor in checkpoint.other_tensors:
            module, part = _owner(tensor.name, names)
            self._parts.setdefault(module, {})[part] = tensor

    def modules(self) -> Iterable[tuple[str, Parts]]:
        """Each weight's tensors, by the name of its module (or of the parameter)."""
        return self._parts.items()

    def find(self, name: str) -> Parts | None:
        """The tensors of the weight `name`, which ends in .weight or is a parameter's, or is the
        primary tensor of one."""
        module, _, part = name.rpartition(".")
        found = self._parts.get(module if part in _PRIMARY else name)
        return found if found and any(one in found for one in _PRIMARY) else None

    def weight(self, parts: Parts) -> TensorRef:
        """The primary tensor, with the shape of the weights as they are used, if it is known."""
        stored = _primary(parts)
        if len(parts) == 1:
            return stored
        try:
            matrix = self.matrix(parts).matrix
        except CheckpointError:
            return stored
        return replace(stored, shape=(matrix.rows, matrix.cols))

    def matrix(self, parts: Parts) -> OtherWeight:
        """A matrix, or a vector as its only row.

        Raises CheckpointError for an encoding that experts cannot have either, or of a wrong shape.
        """
        weight = _primary(parts)
        if len(weight.shape) == 1:
            shape = (1, *weight.shape)
            parts = {
                name: replace(t, shape=shape) if t is weight else t for name, t in parts.items()
            }
            weight = replace(weight, shape=shape)
        elif len(weight.shape) != 2:
            raise _wrong_shape(weight)

        def view(encoding: Encoding) -> StoredView:
            rows, cols = encoding.sizes(weight, encoding.transposed)
            if encoding.transposed:
                return StoredView(rows, cols, cols, rows, transposed=True)
            return StoredView(rows, cols, rows, cols)

        encoding, matrix = stored_matrix(parts, view, self._config, _wrong_shape)
        return OtherWeight(encoding.name, matrix)


def _owner(name: str, names: Set[str]) -> tuple[str, str]:
    """Module (or parameter) and part that a tensor's name means."""
    module, _, part = name.rpartition(".")
    if part in _PARTS:
        return module, part
    for suffix in _SUFFIXES:  # gate_up_proj_scale_inv
        if name.endswith(suffix) and name.removesuffix(suffix) in names:
            return name.removesuffix(suffix), WEIGHT + suffix
    return name, WEIGHT


def _primary(parts: Parts) -> TensorRef:
    return parts[next(name for name in _PRIMARY if name in parts)]


def _wrong_shape(weight: TensorRef, expected: str = "") -> CheckpointError:
    return CheckpointError(
        f"{weight.name} is {weight.dtype} {list(weight.shape)}, which is not supported"
    )
