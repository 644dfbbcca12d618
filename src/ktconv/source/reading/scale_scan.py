"""Looks at all scales of a source's experts before their weights are read.

A NaN, an infinity or a sign where there can be none ends a conversion before it writes anything.
A zero is a scale like others, under which all weights are zero; zeros are counted.

Of the bytes of a weight its scales take a 4000th in FP8 with blocks of 128 x 128, a 30th in
integers of 4 bits with groups of 128, a 17th in MXFP4 and a 9th in NVFP4.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ktconv.errors import KtconvError
from ktconv.source import ExpertMatrix, MoELayer
from ktconv.source.encodings.grids import grid_nbytes
from ktconv.source.reading.matrices import MatrixReader
from ktconv.source.reading.reader import SourceReader
from ktconv.system.threads import run_tasks

Chosen = tuple[MoELayer, Sequence[int]]  # a layer, and experts of it

_AT_ONCE = 16  # matrices of a thread's task


def scales_bytes(layers: Iterable[Chosen]) -> int:
    """Bytes that `scan_scales` reads."""
    return sum(_scale_bytes(matrix) for chosen in layers for matrix in _scaled(chosen))


def scan_scales(layers: Iterable[Chosen], reader: SourceReader, threads: int) -> dict[int, int]:
    """Count the zero scales of each layer, by its index.

    Raises CheckpointError for a scale that cannot be one: the first in the order of layers, experts
    and projections.
    """
    zeros: dict[int, int] = {}
    for chosen in layers:
        matrices = _scaled(chosen)
        if matrices:
            zeros[chosen[0].index] = _scan_layer(matrices, reader, threads)
    return zeros


def _scan_layer(matrices: Sequence[ExpertMatrix], reader: SourceReader, threads: int) -> int:
    """Files stay open for a layer."""
    found: Counter[str] = Counter()
    faults: dict[int, KtconvError] = {}
    lock, kept = threading.Lock(), reader.keeping()

    def worker() -> Callable[[range], None]:
        def scan(places: range) -> None:
            zeros = 0
            for place in places:
                try:
                    zeros += MatrixReader(kept, matrices[place]).scan_scales()
                except KtconvError as error:
                    faults[place] = error  # the first of all is raised, whichever was found first
                    break
            with lock:
                found["zeros"] += zeros

        return scan

    places = range(len(matrices))
    tasks = [places[start : start + _AT_ONCE] for start in places[::_AT_ONCE]]
    try:
        run_tasks(tasks, worker, threads)
        if faults:
            raise faults[min(faults)]
        kept.confirm()
    finally:
        kept.close()
    return found["zeros"]


def _scaled(chosen: Chosen) -> list[ExpertMatrix]:
    """The matrices with scales, in order. Layers that are cut again, or merged, have no source."""
    layer, experts = chosen
    if None in layer.experts[0].values() or not any(matrix.quantization for matrix in layer.kinds):
        return []
    matrices = (matrix for expert in experts for matrix in layer.experts[expert].values())
    return [matrix for matrix in matrices if matrix.quantization is not None]


def _scale_bytes(matrix: ExpertMatrix) -> int:
    assert matrix.scale is not None
    outer = 0 if matrix.scale.outer is None else 4
    return grid_nbytes(matrix.scale, matrix.rows, matrix.cols) + outer
