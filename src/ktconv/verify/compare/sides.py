"""The two conversions by their headers, and the values of one matrix of either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import UsageError
from ktconv.formats import (
    BACKWARD,
    KINDS,
    PROJECTIONS,
    Kind,
    Matrix,
    cut_by_rows,
    scales,
    tensor_name,
)
from ktconv.source import TensorRef
from ktconv.source.remote.urls import no_directory
from ktconv.system.arrays import F32, I8, U8, Bools
from ktconv.system.files import translated
from ktconv.targets.packed.weights import Geometry, PackedWeights, no_packed_experts, open_packed
from ktconv.verify.reading import read_tensor

Expert = tuple[int, Matrix]  # expert, projection
Piece = tuple[int, Kind]  # part, weight or scale

ORDER: Sequence[Matrix] = (*PROJECTIONS, *BACKWARD)


class Input:
    """An opened directory and its packed tensors by layer and matrix."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.only: list[dict[str, Any]] = []  # layers, experts, projections, tensors: only here
        with translated("read", directory):
            if not directory.is_dir():
                raise UsageError(
                    no_directory(directory),
                    "give outputs of quantize-cpu --method int4 or int8",
                )
            self.packed: PackedWeights = open_packed(directory)
        if not self.packed.tensors and not self.packed.damaged:
            raise UsageError(*no_packed_experts(directory))
        self.layers: dict[int, dict[Expert, dict[Piece, TensorRef]]] = {}
        for tensor, place in self.packed.tensors.items():
            matrices = self.layers.setdefault(tensor.layer, {})
            pieces = matrices.setdefault((tensor.expert, tensor.proj), {})
            pieces[tensor.part, tensor.kind] = place

    def about(self) -> dict[str, Any]:
        """Description for the report; None for what differs between layers."""
        layers = self.packed.layers.values()
        methods = {layer.format.key if layer.format else None for layer in layers}
        parts = {layer.parts for layer in layers}
        return {
            "path": str(self.packed.directory),
            "layout": self.packed.layout,
            "method": methods.pop() if len(methods) == 1 else None,
            "numa": parts.pop() if len(parts) == 1 else None,
            "layers": sorted(self.layers),
        }

    def flaws(self) -> Iterator[str]:
        """Flaws of its files, with which it equals nothing."""
        for file, why in sorted(self.packed.damaged.items()):
            yield f"{self.name} has the damaged file {file}: {why.rstrip('.')}."
        for tensor, first, second in self.packed.doubles:
            yield (
                f"{self.name} has {tensor} in {first} and again in {second}: which one is used "
                "depends on the reader."
            )

    def side(self, layer: int, expert: int, proj: Matrix) -> Side:
        """A matrix that it has at least a part of."""
        fault = next(self._faults(layer, expert, proj), None)
        named = f"{self.name} has {fault}" if fault else None
        return Side(self.layers[layer][expert, proj], proj, self.packed.layers[layer], named)

    def _faults(self, layer: int, expert: int, proj: Matrix) -> Iterator[str]:
        """Reasons why a matrix cannot be dequantized: unknown format, missing tensors, wrong
        sizes."""
        pieces, geometry = self.layers[layer][expert, proj], self.packed.layers[layer]
        if geometry.format is None or any(p.file.name.startswith("MOE_") for p in pieces.values()):
            yield "an unknown format"
            return
        for part in range(geometry.parts):
            for kind in KINDS:
                place, stored = pieces.get((part, kind)), geometry.stored(proj, kind)
                assert stored is not None  # the format is known
                name = tensor_name(layer, proj, expert, part, kind)
                if place is None:
                    yield f"no {name}"
                elif place.nbytes != stored[2]:
                    yield f"{place.nbytes} bytes of {name}, not {stored[2]}"


class Side(Struct, frozen=True):
    """All parts of one matrix of one directory."""

    pieces: Mapping[Piece, TensorRef]
    proj: Matrix
    geometry: Geometry
    fault: str | None  # why it cannot be dequantized

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self.pieces.values())

    def load(self) -> dict[Piece, U8]:
        return {piece: read_tensor(self.pieces[piece]) for piece in sorted(self.pieces)}

    def joined(self, data: Mapping[Piece, U8]) -> Values:
        """Codes and steps of the whole matrix."""
        fmt, parts = self.geometry.format, range(self.geometry.parts)
        assert fmt is not None and self.fault is None
        rows, cols = self.geometry.shape(self.proj)
        layout, axis = fmt.layout, 0 if cut_by_rows(self.proj) else 1
        codes = [native.audit_codes(layout, data[part, "weight"], rows, cols) for part in parts]
        stored = [scales.ordered(fmt, data[part, "scale"], rows, cols) for part in parts]
        with np.errstate(all="ignore"):
            step = scales.values(fmt, np.concatenate(stored, axis))
            step = step * np.float32(fmt.traits.scale_units)
        joined = np.concatenate(codes, axis) if len(codes) > 1 else codes[0]
        return Values(joined, step, fmt.traits.max_level)


class Values(Struct, frozen=True):
    """A matrix as codes [rows, cols] and steps [rows, n], one for cols / n columns each."""

    codes: I8
    step: F32
    top: int  # the last level

    def values(self, rows: slice) -> F32:
        """fl32(code * step) of some rows."""
        codes = self.codes[rows].astype(np.float32)
        shaped = codes.reshape(len(codes), self.step.shape[1], -1)
        shaped *= self.step[rows][:, :, None]
        return codes

    def steps(self, rows: slice) -> F32:
        """The step of every element of some rows."""
        width = self.codes.shape[1] // self.step.shape[1]
        found: F32 = np.abs(np.repeat(self.step[rows], width, axis=1))
        return found

    def cut(self, rows: slice, others: F32) -> Bools:
        """Values of some rows at the last level of which `others` are farther out: whatever is
        beyond the levels is cut to the last."""
        codes = self.codes[rows]
        farther = np.where(codes > 0, others > self.values(rows), others < self.values(rows))
        found: Bools = (np.abs(codes.astype(np.int16)) == self.top) & farther
        return found

    def same_as(self, other: Values) -> bool:
        """True only for the same values; values may be equal where it is False."""
        return np.array_equal(self.step, other.step) and np.array_equal(self.codes, other.codes)
