"""Finds how outputs without a manifest were quantized, by their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.formats import Format, Projection, TensorId, scales, split
from ktconv.source import Checkpoint, ExpertMatrix
from ktconv.source.reading.buffers import Buffers, BufferSizes
from ktconv.source.reading.matrices import ROWS_STEP, MatrixReader, Scales, buffer_bytes, chunk_rows
from ktconv.source.reading.reader import SourceReader
from ktconv.source.reading.transposed import transposed
from ktconv.system.arrays import F32
from ktconv.system.opened import Opened
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.scale_rules import scales_of
from ktconv.targets.packed.target import SEARCH_REVISIONS, Options
from ktconv.targets.packed.weights import Geometry, PackedWeights

# Fields of Options, the most probable first: the reference converter's, ours.
_POSSIBLE: tuple[Mapping[str, Any], ...] = (
    {"compat": True, "scale": "amax"},
    *({"compat": False, "scale": "search", "search": n} for n in reversed(SEARCH_REVISIONS)),
    {"compat": False, "scale": "amax"},
)
_EXPERTS = 5  # that are looked at


Seen = Literal["up", "down_bwd"]  # matrices whose rows stay whole in any number of parts


def found_rule(
    packed: PackedWeights, checkpoint: Checkpoint | None, proj: Seen = "up"
) -> Mapping[str, Any]:
    """The fields of Options that explain most scales of some rows of the first layer that can be
    compared, in matrices `proj`; those of the reference converter where none can. A few experts
    decide together, as one of them can be damaged.

    Raises KtconvError for a source that cannot be read.
    """
    for layer in checkpoint.layers if checkpoint else ():
        geometry = packed.layers.get(layer.index)
        there = len(layer.experts), layer.hidden_size, layer.intermediate_size
        if geometry is None or geometry.format is None or there != _dimensions(geometry):
            continue
        experts = geometry.here[:: max(1, len(geometry.here) // _EXPERTS)][:_EXPERTS]
        stored = [_first_scales(packed, layer.index, proj, one, geometry) for one in experts]
        pairs = [
            (_FirstRows(layer.experts[expert], proj, geometry.parts), scale)
            for expert, scale in zip(experts, stored, strict=True)
            if scale is not None
        ]
        if pairs:
            return _best(pairs, geometry.format)
    return _POSSIBLE[0]


def _dimensions(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.experts, geometry.hidden, geometry.intermediate


def _first_scales(
    packed: PackedWeights, layer: int, proj: Seen, expert: int, geometry: Geometry
) -> F32 | None:
    """Scales of the first rows of an expert's matrix; None where they are not there."""
    fmt, shape = geometry.format, geometry.shape(proj)
    assert fmt is not None
    tensor = TensorId(layer, proj, expert, 0, "scale")
    place = packed.tensors.get(tensor)
    if place is None or place.nbytes != fmt.layout.scale_size(*shape):
        return None
    ordered = scales.ordered(fmt, packed.map(tensor).copy(), *shape)
    return scales.values(fmt, ordered)[:ROWS_STEP]


class _FirstRows(Struct, frozen=True):
    """The source of the first rows of a matrix."""

    expert: Mapping[Projection, ExpertMatrix]
    proj: Seen
    parts: int

    def scales(self, rows: int, fmt: Format, rule: str, compat: bool) -> F32:
        matrix = self.expert["up" if self.proj == "up" else "down"]
        source = MatrixReader(SourceReader([], []), matrix, compat, keep_integers=not compat)
        most = chunk_rows(matrix) if self.proj == "down_bwd" else rows
        buffers = Buffers(BufferSizes(buffer_bytes(matrix, min(most, matrix.rows))))
        with source.open() as fd:
            view = self._view(source, fd, source.load_scales(), rows, buffers)
            return scales_of(fmt, view, Proof.plain(rule)).most[:rows]

    def _view(
        self, source: MatrixReader, fd: Opened, grid: Scales | None, rows: int, buffers: Buffers
    ) -> native.Matrix:
        matrix = source.matrix
        if self.proj == "down_bwd":
            owned = split("down", matrix.rows, matrix.cols, 0, self.parts)
            return next(transposed(source, fd, grid, owned, buffers))[1]
        source.read(fd, range(rows), buffers.source, buffers.bounce)
        return source.view(range(rows), grid, buffers.source, 0, matrix.cols)


def _best(pairs: Sequence[tuple[_FirstRows, F32]], fmt: Format) -> Mapping[str, Any]:
    def explained(options: Mapping[str, Any]) -> int:
        rules = Options(**options).rule, options["compat"]
        return sum(
            int(np.count_nonzero(first.scales(len(stored), fmt, *rules) == stored))
            for first, stored in pairs
        )

    return max(_POSSIBLE, key=explained)  # the first of those that explain as many
