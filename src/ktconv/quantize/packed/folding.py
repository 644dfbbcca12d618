"""`--fold up-down`: factors between up and down of each expert, and the task that converts them.

The factors even out the columns of down: given the scales of its rows, the best factor of a column
is found as a row's scale is, by the search for the smallest squared error (SPEC 9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ktconv import native
from ktconv.conversion.pipeline import Task
from ktconv.conversion.tasks import Advance
from ktconv.errors import UsageError
from ktconv.families.family import GATED_FUNCTIONS, ExpertActivation
from ktconv.formats import FORMATS, split
from ktconv.formats.folding import LARGEST, factors, folded_importance, nearest_exponents
from ktconv.native import Layout
from ktconv.quantize.packed.task import QuantizeTask
from ktconv.quantize.packed.ways import Asked, Expert, Way
from ktconv.source import ExpertMatrix
from ktconv.source.reading.buffers import Buffers
from ktconv.source.reading.matrices import ROWS_STEP, MatrixReader
from ktconv.source.reading.reader import Span
from ktconv.system.arrays import F32, I8, I64
from ktconv.system.units import listed
from ktconv.targets.packed.target import Plan
from ktconv.writer.staging import Staging

SAMPLE_BLOCKS = 4  # of ROWS_STEP rows of down, by which factors are chosen
_ROUNDS = 2  # each: scales of rows, then factors of columns
_COPIES = 5  # of the sample in memory, in float32, while factors are chosen


# ---- what can be folded ----------------------------------------------------------------


def why_not(activation: ExpertActivation) -> str:
    """Reason why up must not be scaled; empty where the result is proportional to up's output."""
    if not activation.gated:
        return "without a gate their activation is not linear in the output of up"
    if activation.limited:
        return "their activation clamps the output of up"
    if activation.capped:
        return "their activation bounds the output of up"
    if activation.alpha is not None:
        return "their activation adds 1 to the output of up"
    if activation.function not in GATED_FUNCTIONS:
        return "their activation is not known to be linear in the output of up"
    return ""


# ---- the choice ------------------------------------------------------------------------


def column_exponents(layout: Layout, sample: F32, importance: F32 | None = None) -> I8:
    """Exponents [I] of the factors that make the squared error of rows of down, `sample` [R, I],
    small; `importance` [I]: what those of each column count.

    Each round takes the scale of every row under the factors, and then of every column the factor
    with the smallest squared error under those scales. Factors are relative to the median one.
    """
    found = np.zeros(sample.shape[1], np.int8)
    for _ in range(_ROUNDS):
        scale = _row_scales(layout, sample, found, importance)
        if not scale.any():
            return np.zeros(sample.shape[1], np.int8)
        found = _relative(_column_factors(layout, sample, scale))
    return found


def _row_scales(layout: Layout, sample: F32, exponents: I8, importance: F32 | None) -> F32:
    columns = np.ascontiguousarray(factors(-exponents.astype(np.int64)))
    matrix = _matrix(sample, columns)
    return _searched(layout, matrix, folded_importance(importance, exponents))


def _column_factors(layout: Layout, sample: F32, scale: F32) -> F32:
    """The search of each column [R] over its row's scales; an error counts their squares."""
    used = scale > 0
    steps = np.divide(sample, scale[:, None], out=np.zeros_like(sample), where=used[:, None])
    largest = np.frexp(scale.max())[1]
    weights = np.square(np.ldexp(scale, -largest))
    return _searched(layout, _matrix(np.ascontiguousarray(steps.T)), weights)


def _searched(layout: Layout, matrix: native.Matrix, importance: F32) -> F32:
    _, scale = native.quantize(layout, matrix, native.Choice("search", importance))
    found: F32 = scale.reshape(-1)
    return found


def _matrix(values: F32, col_factor: F32 | None = None) -> native.Matrix:
    data = values.view(np.uint8).reshape(-1)
    return native.Matrix(data, "F32", *values.shape, col_factor=col_factor)


def _relative(values: F32) -> I8:
    """Exponents of factors [I] relative to their median; 0 of a column of zeros."""
    positive = values > 0
    found: I64 = np.zeros(len(values), np.int64)
    if positive.any():
        found[positive] = nearest_exponents(values[positive])
        middle = np.sort(found[positive])[positive.sum() // 2]
        found[positive] = np.clip(found[positive] - middle, -LARGEST, LARGEST)
    return found.astype(np.int8)


def _sampled(rows: int) -> Sequence[range]:
    """Some blocks of rows, evenly spaced; all of a matrix that has few."""
    starts = range(0, rows, ROWS_STEP)
    chosen = starts[:: max(1, len(starts) // SAMPLE_BLOCKS)][:SAMPLE_BLOCKS]
    return [range(start, min(start + ROWS_STEP, rows)) for start in chosen]


# ---- the task --------------------------------------------------------------------------


class FoldTask(Struct, frozen=True):
    """Up and down of one expert: chooses factors, then converts both."""

    up: QuantizeTask
    down: QuantizeTask

    @property
    def source_bytes(self) -> int:
        return self.up.source_bytes + self.down.source_bytes

    def spans(self) -> Sequence[Span]:
        return [*self.down.spans(), *self.up.spans()]

    def run(self, staging: Staging, buffers: Buffers, advance: Advance) -> dict[str, Any]:
        exponents = expert_exponents(self.down, buffers)
        tasks = (replace(task, exponents=exponents) for task in (self.down, self.up))
        results: dict[str, Any] = {}
        for task in tasks:
            results |= task.run(staging, buffers, advance)
        return results


def expert_exponents(down: QuantizeTask, buffers: Buffers) -> I8:
    """Exponents of all channels [I] of an expert; those of each part, whose rows have scales of
    their own, by that part of `down` alone."""
    layer, options = down.layer, down.options
    sample = _read_sample(down, buffers)
    layout, weights = FORMATS[options.method].layout, down.importance
    found = []
    for part in range(options.numa):
        owned = split("down", layer.hidden_size, layer.intermediate_size, part, options.numa)
        columns = slice(owned.col_start, owned.col_stop)
        own = None if weights is None else np.ascontiguousarray(weights[columns])
        found.append(column_exponents(layout, np.ascontiguousarray(sample[:, columns]), own))
    return np.concatenate(found)


def _read_sample(task: QuantizeTask, buffers: Buffers) -> F32:
    """Some rows of down, decoded: [R, I]."""
    matrix: ExpertMatrix = task.matrix
    source = MatrixReader(task.reader, matrix)
    pieces = []
    with source.open() as fd:
        scales = source.load_scales()
        for chunk in _sampled(matrix.rows):
            source.read(fd, chunk, buffers.source, buffers.bounce)
            view = source.view(chunk, scales, buffers.source, 0, matrix.cols)
            pieces.append(source.finite(native.decode(view), chunk.start))
    return np.concatenate(pieces)


class Folding(Way):
    """`--fold`, as a conversion uses it."""

    @staticmethod
    def open(asked: Asked) -> Folding | None:
        return Folding() if asked.options.fold else None

    def check(self, plan: Plan) -> None:
        """UsageError for experts that a factor of up would make compute something else."""
        if plan.target.options.compat:
            raise UsageError(
                "--fold writes other weights than the reference converter, whose bytes --compat "
                "asks for",
                "omit --compat or --fold",
            )
        layers = plan.moe_layers
        refused = {layer.index: layer.activation for layer in layers if why_not(layer.activation)}
        if refused:
            first = next(iter(refused.values()))
            raise UsageError(
                f"--fold up-down would change what the experts of "
                f"{listed('layer', refused)} compute: {why_not(first)} ({first})",
                "omit --fold",
            )

    def notes(self, plan: Plan) -> list[str]:
        kinds = (matrix for layer in plan.moe_layers for matrix in layer.kinds)
        integers = any(matrix.element.integer_zero is not None for matrix in kinds)
        if not integers or not plan.target.options.keep_integers:
            return []
        return [
            "integers of up and down are quantized again, also where they could be kept: --fold"
        ]

    def worker_memory(self, plan: Plan) -> int:
        return max(
            _COPIES * 4 * len(_sampled(layer.hidden_size)) * ROWS_STEP * layer.intermediate_size
            for layer in plan.moe_layers
        )

    def tasks(self, expert: Expert, tasks: list[Task]) -> list[Task]:
        """Up and down, the last two, become one."""
        up, down = (task for task in tasks[-2:] if isinstance(task, QuantizeTask))
        return [*tasks[:-2], FoldTask(up, down)]
