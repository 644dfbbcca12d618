"""Finds where the row scales of matrices that are cut by columns (down, gate_bwd and up_bwd) come
from, in an output that was cut again.

`ktconv reshard` keeps scales: a part that is cut off has those of the part it was in, and parts are
joined only where their scales are the same, or a row of one is all zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ktconv import native
from ktconv.formats import FORMATS
from ktconv.source.reading.matrices import MatrixReader, Scales
from ktconv.system.arrays import F32, U8
from ktconv.targets.packed.proof import Proof
from ktconv.targets.packed.scale_rules import Allowed, scales_of
from ktconv.verify.packed.output import PackedOutput


def parts_before(output: PackedOutput) -> list[int]:
    """Numbers of parts that the weights had: when they were quantized, ..., before the last cut.
    Empty if they were never cut again, or have a scale per group, which stay the same."""
    record = output.manifest.resharded_from if output.manifest else None
    fmt = FORMATS[output.options.method]
    if record is None or fmt.group:
        return []
    earlier = record.get("earlier")
    counts = [*(earlier if isinstance(earlier, list) else []), record.get("numa")]
    shapes = {(layer.hidden, layer.intermediate) for layer in output.packed.layers.values()}
    usable = all(
        type(count) is int and not any(fmt.check(*shape, count) for shape in shapes)
        for count in counts
    )
    return counts if usable else []


def inherited(scales: Sequence[F32], counts: Sequence[int]) -> list[F32]:
    """Scales of the parts after the last cut, from those of the first of `counts` parts."""
    found = list(scales)
    for before, after in pairwise(counts):
        found = [
            np.maximum.reduce([found[part] for part in _overlapping(before, after, index)])
            for index in range(after)
        ]
    return found


def _overlapping(before: int, after: int, index: int) -> range:
    """Parts, of `before` equal ones of a matrix, that the part `index` of `after` has columns of.

    >>> _overlapping(2, 3, 1)
    range(0, 2)
    """
    return range(index * before // after, -(-(index + 1) * before // after))


class PartsBefore:
    """The scales of a matrix's parts before it was cut again, computed from the source once more;
    `shape` is that of the whole."""

    def __init__(self, output: PackedOutput, shape: tuple[int, int], proof: Proof) -> None:
        options = output.options
        self._counts = [*parts_before(output), options.numa]
        self._fmt, self._proof = FORMATS[options.method], proof
        self._cols = shape[1] // self._counts[0]
        self.count = self._counts[0] if len(self._counts) > 1 else 0  # of parts, if there are any
        self._allowed: list[list[Allowed]] = [[] for _ in range(self.count)]

    def compare(self, source: MatrixReader, grid: Scales | None, chunk: range, data: U8) -> None:
        """The rows of a chunk, which `data` has."""
        for part in range(self.count):
            first, cols = part * self._cols, self._cols
            self.put(part, source.view(chunk, grid, data, first, cols))

    def put(self, part: int, view: native.Matrix) -> None:
        """The next rows of a part."""
        proof = self._proof.columns(part * self._cols, (part + 1) * self._cols)
        self._allowed[part].append(scales_of(self._fmt, view, proof))

    def scales(self) -> Sequence[Allowed | None]:
        """Allowed scales of each part now; None if it was never cut again."""
        if not self._allowed:
            return [None] * self._counts[0]
        found = [Allowed.joined(pieces) for pieces in self._allowed]
        least = inherited([one.least for one in found], self._counts)
        most = inherited([one.most for one in found], self._counts)
        return [Allowed(*both) for both in zip(least, most, strict=True)]
