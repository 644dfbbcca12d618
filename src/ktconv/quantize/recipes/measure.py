"""The errors of methods on a sample of rows of every layer and projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import LayerUnit
from ktconv.quantize.encoded.stored import second_scale, stored_matrix, tensor_scale
from ktconv.quantize.estimate.sampling import Limits, Sample, TimedReader, draw
from ktconv.source import Checkpoint, Projection
from ktconv.source.reading.matrices import MatrixReader
from ktconv.system.arrays import F32
from ktconv.targets.encoded.kept import is_kept
from ktconv.targets.encoded.recipe import Method
from ktconv.targets.encoded.scheme import Scheme
from ktconv.targets.encoded.target import weight_dtype

# (layer, expert, projection) -> what squared errors of each column count; None: all the same.
Weights = Callable[[int, int, Projection], "F32 | None"]
Cell = tuple[int, Projection]  # a layer's projection
DIGITS = 6  # of errors, so that the choice does not depend on the order of sums
NO_DEADLINE = 1e9  # seconds: the same rows on every machine


class Measured(Struct, frozen=True):
    """Relative squared errors: by method and cell the sum of squared errors over that of squared
    weights, both counted by importance where it was given."""

    errors: Mapping[Method, Mapping[Cell, float]]
    samples: int
    bytes_read: int


class Measurement:
    """Measurement of the methods on the layers of a plan; nothing is read before `run`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        units: Sequence[LayerUnit],
        methods: Sequence[Method],
        *,
        search: bool,
        requantize: bool,
        threads: int,
        weights: Weights | None = None,
    ) -> None:
        self._checkpoint, self._methods, self._threads = checkpoint, methods, threads
        self._schemes = [method.scheme(search) for method in methods]
        self._requantize, self._weights = requantize, weights
        # Layer by layer: importance is kept for two layers at a time.
        samples = draw(units, Limits(seconds=NO_DEADLINE))
        self._samples = sorted(samples, key=lambda one: (one.layer.index, one.expert))

    @property
    def stages(self) -> dict[str, int]:
        """Stages that an observer hears of, and the bytes of each."""
        sizes: dict[str, int] = {}
        for sample in self._samples:
            name = _stage(sample)
            sizes[name] = sizes.get(name, 0) + sample.matrix.nbytes(len(sample.rows))
        return sizes

    def run(self, observer: Observer | None = None) -> Measured:
        """Raises CheckpointError for a NaN or an infinity in the sample, ResourceError for a file
        that cannot be read."""
        observer = observer or Observer()
        reader = TimedReader(self._checkpoint, NO_DEADLINE)
        sums: dict[Cell, list[tuple[float, float]]] = {}
        observer.begin(list(self.stages))
        executor, stage = ThreadPoolExecutor(self._threads), ""
        try:
            results = executor.map(lambda one: self._measure(one, reader), self._samples)
            for sample, found in zip(self._samples, results, strict=True):
                if _stage(sample) != stage:
                    if stage:
                        observer.unit_finished(stage)
                    stage = _stage(sample)
                    observer.unit_started(stage)
                before = sums.setdefault(sample.cell, [(0.0, 0.0)] * len(self._methods))
                sums[sample.cell] = [
                    (a + c, b + d) for (a, b), (c, d) in zip(before, found, strict=True)
                ]
                observer.advanced(sample.matrix.nbytes(len(sample.rows)))
            if stage:
                observer.unit_finished(stage)
        finally:
            reader.stop()
            executor.shutdown(cancel_futures=True)
        errors = {
            method: {cell: _relative(*some[i]) for cell, some in sums.items()}
            for i, method in enumerate(self._methods)
        }
        return Measured(errors, len(self._samples), reader.bytes_read)

    def _measure(self, sample: Sample, reader: TimedReader) -> list[tuple[float, float]]:
        """Sums of squared errors and of squared weights, by method."""
        matrix, rows = sample.matrix, sample.rows
        source = MatrixReader(reader, matrix)
        data, scales = source.read_alone(rows)
        view = source.view(rows, scales, data, 0, matrix.cols)
        with source.only_finite(rows.start):
            largest = native.largest(view)
        wanted = native.decode(view).astype(np.float64)
        counted = None
        if self._weights is not None:
            counted = self._weights(sample.layer.index, sample.expert, sample.proj)
        squares = _total(wanted, counted)
        half = weight_dtype(matrix) == "F16"
        found = []
        for scheme in self._schemes:
            kept = scheme.encodes and not self._requantize and is_kept(scheme, matrix, half)
            squared = 0.0
            if not kept:
                rounded = scheme.row.is_int and not (half and scheme.is_half(half))
                own = MatrixReader(reader, matrix, round_to_bf16=rounded)
                values = _encoded(
                    scheme, own.view(rows, scales, data, 0, matrix.cols), half, largest
                )
                squared = _total(values - wanted, counted)
            found.append((squared, squares))
        return found


def _encoded(scheme: Scheme, view: native.Matrix, half: bool, largest: float) -> F32:
    """Values after a round trip. A second scale is that of these rows."""
    factor = second_scale(scheme, largest)
    codes, scales = native.encode(scheme.encoding(half), view, tensor_scale(scheme, factor))
    return native.decode(stored_matrix(scheme, codes, scales, view.cols, half, factor))


def _total(values: np.ndarray, counted: F32 | None) -> float:
    by_column = np.einsum("ij,ij->j", values, values)
    return float(by_column.sum() if counted is None else by_column @ counted)


def _relative(error: float, squares: float) -> float:
    """Rounded to as many digits as machines agree on."""
    if not squares or not error:
        return 0.0
    found = error / squares
    return round(found, DIGITS - 1 - math.floor(math.log10(found)))


def _stage(sample: Sample) -> str:
    return f"measure layer {sample.layer.index}"
