"""The errors that methods and scale rules will have, predicted from a sample of rows.

    Estimation(prepare(request)).run().facts()["candidates"]

A prediction for a projection of a layer is the mean of the relative RMS errors of the sampled rows
of its experts, as a conversion reports that of whole matrices. Nothing is written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ktconv import native
from ktconv.conversion.pipeline import Observer
from ktconv.conversion.plan import LayerUnit
from ktconv.errors import ResourceError
from ktconv.formats import FORMATS, output_formats, reference, split
from ktconv.quantize.estimate.predictions import F64, Candidate, Estimate
from ktconv.quantize.estimate.sampling import Limits, OutOfTimeError, Sample, TimedReader, draw
from ktconv.quantize.packed.run import Preflight
from ktconv.source import Projection
from ktconv.source.reading.matrices import MatrixReader
from ktconv.system.arrays import F32
from ktconv.targets.packed.target import Options, ScaleRule

if TYPE_CHECKING:
    from ktconv.quantize.packed.importance.load import LayerWeights
    from ktconv.quantize.packed.importance.source_weights import NormWeights

# (layer, expert, projection) -> what squared errors count, [cols] of the whole matrix; None: all
# the same.
Weights = Callable[[int, int, Projection], F32 | None]

READING_THREADS = 8  # at least: disks answer several reads sooner than one after the other
STAGES = 4  # of progress


class Estimation:
    """The estimate of a planned conversion; nothing is read before `run`."""

    def __init__(
        self,
        preflight: Preflight,
        limits: Limits | None = None,
        weights: Weights | None = None,
    ) -> None:
        """`weights`: instead of those of the preflight."""
        self._units, self._limits = preflight.units, limits or Limits()
        self._options = preflight.plan.target.options
        self._checkpoint = preflight.plan.checkpoint
        self._threads = preflight.request.threads or max(preflight.threads, READING_THREADS)
        self._left_out = left_out(self._units, self._options)
        methods = [key for key in output_formats() if key not in self._left_out]
        rules: list[tuple[ScaleRule, bool]] = [("amax", False), ("search", False)]
        if weights is not None or preflight.weights is not None:
            rules.append(("search", True))
        self._candidates = [Candidate(key, *rule) for key, rule in product(methods, rules)]
        self._samples = draw(self._units, self._limits)
        self._weights = weights
        if preflight.weights is not None and weights is None:
            self._weights = SampledWeights(preflight.weights.layer, self._samples).of
        self._sizes = [one.matrix.nbytes(len(one.rows)) for one in self._samples]
        self._members = _stages(len(self._samples))

    @property
    def stages(self) -> dict[str, int]:
        """Stages that an observer hears of, and the bytes of each."""
        return {name: sum(self._sizes[i] for i in at) for name, at in self._members.items()}

    def run(self, observer: Observer | None = None) -> Estimate:
        """Sample what a conversion would read, for no longer than the limits say.

        Raises CheckpointError for a NaN or an infinity in the sample, ResourceError for a file
        that cannot be read.
        """
        started = time.monotonic()
        reader = TimedReader(self._checkpoint, self._limits.seconds)
        found = self._measure_all(reader, observer or Observer())
        if not found:
            raise ResourceError(
                f"no rows of {self._checkpoint.path} could be read within "
                f"{self._limits.seconds:.0f} s",
                "copy the model, or some layers of it, to a faster disk",
            )
        return Estimate(
            self._options,
            self._units,
            self._candidates,
            self._left_out,
            found,
            len(self._samples),
            self._weights is not None,
            self._limits,
            reader.bytes_read,
            time.monotonic() - started,
        )

    def _measure_all(self, reader: TimedReader, observer: Observer) -> list[tuple[Sample, F64]]:
        """Samples that were measured before time was over, in their order."""
        observer.begin(list(self._members))
        found: list[tuple[Sample, F64]] = []
        executor = ThreadPoolExecutor(self._threads)
        try:
            results = executor.map(lambda sample: self._measure(sample, reader), self._samples)
            for name, members in self._members.items():
                observer.unit_started(name)
                for i in members:
                    if (errors := next(results)) is not None:
                        found.append((self._samples[i], errors))
                    observer.advanced(self._sizes[i])
                observer.unit_finished(name)
        finally:
            reader.stop()
            executor.shutdown(cancel_futures=True)
        return found

    def _measure(self, sample: Sample, reader: TimedReader) -> F64 | None:
        """The errors of one sample; None where time is over."""
        try:
            return self._errors_of(sample, reader)
        except OutOfTimeError:
            return None

    def _errors_of(self, sample: Sample, reader: TimedReader) -> F64:
        """[candidates, 2]."""
        matrix, rows = sample.matrix, sample.rows
        data, scales = MatrixReader(reader, matrix).read_alone(rows)
        importance = None
        if self._weights is not None:
            importance = self._weights(sample.layer.index, sample.expert, sample.proj)
        sums = np.zeros((len(self._candidates), 2, 2))
        for first, stop in self._columns(sample):
            counted = None if importance is None else importance[first:stop]
            for i, candidate in enumerate(self._candidates):
                options = candidate.options(self._options)
                own = MatrixReader(reader, matrix, options.compat, options.keep_integers)
                view = own.view(rows, scales, data, first, stop - first)
                with own.only_finite(rows.start, first):
                    sums[i] += _squares(candidate, view, counted)
        return relative(sums)

    def _columns(self, sample: Sample) -> list[tuple[int, int]]:
        """The columns of the sample's matrix that have scales of their own: NUMA parts of down."""
        layer, numa = sample.layer, self._options.numa
        parts = (
            split(sample.proj, layer.hidden_size, layer.intermediate_size, part, numa)
            for part in range(numa)
        )
        return list(dict.fromkeys((part.col_start, part.col_stop) for part in parts))


class SampledWeights:
    """Importance of the inputs of sampled experts. That of a layer is computed for all of its
    experts when one is asked for, and kept for those that are sampled."""

    def __init__(
        self,
        of_layer: Callable[[int], LayerWeights | NormWeights | None],
        samples: Sequence[Sample],
    ) -> None:
        self._of_layer, self._lock = of_layer, threading.Lock()
        self._wanted = {(one.layer.index, one.expert, one.proj) for one in samples}
        self._layers: set[int] = set()
        self._found: dict[tuple[int, int, Projection], F32] = {}

    def of(self, layer: int, expert: int, proj: Projection) -> F32 | None:
        """[inputs]; None in a layer without importance. For use from several threads."""
        with self._lock:
            if layer not in self._layers:
                self._compute(layer)
                self._layers.add(layer)
        return self._found.get((layer, expert, proj))

    def _compute(self, layer: int) -> None:
        weights = self._of_layer(layer)
        if weights is not None:
            for key in self._wanted:
                own = weights.of(*key[1:]) if key[0] == layer else None
                if own is not None:
                    self._found[key] = own.copy()


def _stages(count: int) -> dict[str, range]:
    """The samples in a few groups, by what progress calls them."""
    stages = min(STAGES, count)
    bounds = [count * i // stages for i in range(stages + 1)]
    return {f"sample {i + 1} of {stages}": range(bounds[i], bounds[i + 1]) for i in range(stages)}


def _squares(candidate: Candidate, source: native.Matrix, importance: F32 | None) -> F64:
    """Sums of squares [plain and by importance, of errors and of weights]."""
    fmt, shape = FORMATS[candidate.method], (source.rows, source.cols)
    choice = native.Choice(candidate.rule, importance if candidate.weighted else None)
    packed = np.empty(native.packed_size(fmt.layout, *shape), np.uint8)
    packed_scale = native.aligned_bytes(fmt.layout.scale_size(*shape))
    native.quantize_pack(fmt.layout, source, packed, packed_scale, choice=choice)
    codes, scale = native.unpack_weight(fmt.layout, *shape, packed, packed_scale)
    values = native.decode(source)
    errors = reference.dequantize(fmt, codes, scale)
    errors -= values
    by_column = np.stack([_column_squares(errors), _column_squares(values)])
    counted = by_column if importance is None else by_column * importance
    return np.stack([by_column.sum(axis=1), counted.sum(axis=1)])


def _column_squares(values: F32) -> F64:
    squares: F64 = np.einsum("ij,ij->j", values, values, dtype=np.float64)
    return squares


def relative(sums: F64) -> F64:
    """Square roots of errors by weights, the last axis; 0 for no weights."""
    errors, weights = sums[..., 0], sums[..., 1]
    return np.sqrt(np.divide(errors, weights, out=np.zeros_like(errors), where=weights > 0))


def left_out(units: Sequence[LayerUnit], options: Options) -> dict[str, str]:
    """Methods that cannot represent these layers, and why."""
    found = {}
    for key, fmt in output_formats().items():
        layers = (unit.layer for unit in units)
        reasons = (
            fmt.check(one.hidden_size, one.intermediate_size, options.numa) for one in layers
        )
        if reason := next(filter(None, reasons), None):
            found[key] = reason
    return found
