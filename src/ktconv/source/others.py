"""Tensors other than routed experts, as matrices that are read in the same way."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Set
from typing import NamedTuple

from msgspec.structs import replace

from ktconv.errors import CheckpointError
from ktconv.source.encodings import ENCODINGS, PARTS, stored_matrix
from ktconv.source.encodings.base import BIAS, WEIGHT, Encoding, Parts
from ktconv.source.types import Checkpoint, ExpertMatrix, TensorRef
from ktconv.source.views import StoredView
from ktconv.system.files import FileTooShortError
from ktconv.system.opened import opened_source
from ktconv.system.regular_files import unreadable

_PARTS = PARTS - {BIAS}
_SHAPE_DTYPES = {"I64": "<2q", "I32": "<2i"}
_SUFFIXES = tuple(part.removeprefix(WEIGHT) for part in _PARTS if part.startswith(f"{WEIGHT}_"))
_PRIMARY = tuple(dict.fromkeys(encoding.primary for encoding in ENCODINGS))


class OtherWeight(NamedTuple):
    encoding: str  # its name
    matrix: ExpertMatrix


class OtherWeights:
    """The weights among a checkpoint's other tensors, whatever each consists of."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._config = checkpoint.config.checked
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
        stored = _primary_of(parts)
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
        weight = _primary_of(parts)
        if len(weight.shape) == 1:
            row = replace(weight, shape=(1, *weight.shape))
            parts = {name: row if one is weight else one for name, one in parts.items()}
            weight = row
        elif len(weight.shape) != 2:
            raise _wrong_shape(weight)

        shape = _declared_shape(parts) or self._by_bits(parts, weight)

        def view(encoding: Encoding) -> StoredView:
            rows, cols = encoding.sizes(weight, encoding.transposed)
            if shape is not None and not encoding.transposed:
                rows, cols = shape
            if encoding.transposed:
                return StoredView(rows, cols, cols, rows, transposed=True)
            return StoredView(rows, cols, rows, cols)

        found, matrix = stored_matrix(parts, view, self._config, _wrong_shape)
        return OtherWeight(found.encoding.name, matrix)

    def _by_bits(self, parts: Parts, weight: TensorRef) -> tuple[int, int] | None:
        """The shape of packed integers by the bits that config.json gives."""
        bits = self._config.packed_bits
        if "weight_packed" not in parts or weight.dtype != "I32" or bits is None:
            return None
        return weight.shape[0], weight.shape[1] * 32 // bits


def _declared_shape(parts: Parts) -> tuple[int, int] | None:
    """Shape in weight_shape, which is read from its file: how many bits packed numbers have follows
    from it where their scales leave it open."""
    tensor = parts.get("weight_shape")
    if tensor is None or tensor.shape != (2,) or tensor.dtype not in _SHAPE_DTYPES:
        return None
    data = bytearray(tensor.nbytes)
    try:
        with opened_source(tensor.file) as opened:
            opened.read(memoryview(data), tensor.offset)
    except FileTooShortError:
        raise CheckpointError(f"{tensor.file} became shorter while it was read") from None
    except OSError as error:
        raise unreadable(tensor.file, error) from error
    rows, cols = struct.unpack(_SHAPE_DTYPES[tensor.dtype], data)
    return rows, cols


def _owner(name: str, names: Set[str]) -> tuple[str, str]:
    """Module (or parameter) and part that a tensor's name means."""
    module, _, part = name.rpartition(".")
    if part in _PARTS:
        return module, part
    for suffix in _SUFFIXES:  # gate_up_proj_scale_inv
        if name.endswith(suffix) and name.removesuffix(suffix) in names:
            return name.removesuffix(suffix), WEIGHT + suffix
    return name, WEIGHT


def primary(parts: Parts) -> TensorRef | None:
    """The tensor of the weight itself; None for a module of other tensors alone."""
    return next((parts[name] for name in _PRIMARY if name in parts), None)


def _primary_of(parts: Parts) -> TensorRef:
    found = primary(parts)
    assert found is not None, "find() found it"
    return found


def _wrong_shape(weight: TensorRef, expected: str = "") -> CheckpointError:
    return CheckpointError(
        f"{weight.name} is {weight.dtype} {list(weight.shape)}, which is not supported"
    )
