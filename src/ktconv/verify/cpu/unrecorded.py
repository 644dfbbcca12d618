"""How outputs without a manifest were quantized, by their scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ktconv.checkpoint import Checkpoint, ExpertMatrix
from ktconv.formats import Format, TensorId, scales
from ktconv.packed.proof import Proof
from ktconv.packed.scale_rules import scales_of
from ktconv.packed.weights import Geometry, PackedWeights
from ktconv.reading.matrices import ROWS_STEP, MatrixReader, buffer_bytes
from ktconv.reading.reader import BOUNCE_BYTES, SourceReader
from ktconv.system.arrays import F32

# Fields of Options, the most probable first: the reference converter's, ours.
_POSSIBLE: tuple[Mapping[str, Any], ...] = (
    {"compat": True, "scale": "amax"},
    {"compat": False, "scale": "search"},
    {"compat": False, "scale": "amax"},
)
_EXPERTS = 5  # that are looked at


def found_rule(packed: PackedWeights, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """The fields of Options that explain most scales of some rows of the first layer that can be
    compared; those of the reference converter where none can. A few experts decide together, as one
    of them can be damaged.

    Raises KtconvError for a source that cannot be read.
    """
    for layer in checkpoint.layers if checkpoint else ():
        geometry = packed.layers.get(layer.index)
        there = len(layer.experts), layer.hidden_size, layer.intermediate_size
        if geometry is None or geometry.format is None or there != _dimensions(geometry):
            continue
        experts = geometry.here[:: max(1, len(geometry.here) // _EXPERTS)][:_EXPERTS]
        stored = [_first_scales(packed, layer.index, one, geometry) for one in experts]
        pairs = [
            (layer.experts[expert]["up"], scale)
            for expert, scale in zip(experts, stored, strict=True)
            if scale is not None
        ]
        if pairs:
            return _best(pairs, geometry.format)
    return _POSSIBLE[0]


def _dimensions(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.experts, geometry.hidden, geometry.intermediate


def _first_scales(packed: PackedWeights, layer: int, expert: int, geometry: Geometry) -> F32 | None:
    """Of the first rows of an expert's up; None where they are not there."""
    fmt, shape = geometry.format, geometry.shape("up")
    assert fmt is not None
    tensor = TensorId(layer, "up", expert, 0, "scale")
    place = packed.tensors.get(tensor)
    if place is None or place.nbytes != fmt.layout.scale_size(*shape):
        return None
    ordered = scales.ordered(fmt, packed.map(tensor).copy(), *shape)
    return scales.values(fmt, ordered)[:ROWS_STEP]


def _best(pairs: Sequence[tuple[ExpertMatrix, F32]], fmt: Format) -> Mapping[str, Any]:
    def explained(options: Mapping[str, Any]) -> int:
        rules = options["scale"], options["compat"]
        return sum(
            int(np.count_nonzero(_scales_by(matrix, len(stored), fmt, *rules) == stored))
            for matrix, stored in pairs
        )

    return max(_POSSIBLE, key=explained)  # the first of those that explain as many


def _scales_by(matrix: ExpertMatrix, rows: int, fmt: Format, rule: str, compat: bool) -> F32:
    """The scales of the matrix's first rows."""
    source = MatrixReader(SourceReader([], []), matrix, compat, keep_integers=not compat)
    data, bounce = np.empty(buffer_bytes(matrix, rows), np.uint8), np.empty(BOUNCE_BYTES, np.uint8)
    with source.open() as fd:
        source.read(fd, range(rows), data, bounce)
        view = source.view(range(rows), source.load_scales(), data, 0, matrix.cols)
    return scales_of(fmt, view, Proof.by(rule)).most
