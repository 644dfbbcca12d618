"""A measured row of `--mode sft`, and how it is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict

from ktconv.bench.limits import Limits
from ktconv.bench.presets import Shape
from ktconv.bench.rows import DRIFT, SPREAD, same_facts
from ktconv.bench.sft.steps import Times


class Timing(Struct, frozen=True):
    """Timing of a forward that saves, or of a backward."""

    median_us: float
    p10_us: float
    p90_us: float
    gflops: float
    share_of_bf16: float  # of the machine's limit of bf16 products

    @property
    def wide(self) -> bool:
        """Whether something else ran at the same time."""
        return self.p90_us > SPREAD * self.median_us


class Row(Struct, frozen=True):
    """A row of the report; its names never change. See docs/bench-sft.schema.json.

    `errors`, by gradients.NAMES: relative in the 2-norm, against fp32 autograd on the same packed
    weights. `kernel_errors`: against that with activations rounded as the kernels do, which bounds
    apply to, none of other engines; `beyond_bound` are the names of those that exceed theirs.
    """

    method: str
    shape: dict[str, Any]
    routing: str
    rank: int
    tokens: int
    threads: int
    isa: str
    forward: Timing
    backward: Timing
    steps: int
    saved_bytes: int | None  # that a forward keeps for its backward; None: not known
    scratch_bytes: int | None  # of a call, at most
    errors: dict[str, float]
    kernel_errors: dict[str, float]
    bounds: dict[str, float]
    beyond_bound: list[str]
    peak_gflops: float  # bf16 products of this machine, around this row
    disturbed: bool
    engine: str = "ktconv"
    parts: int = 1
    layer: int | None = None  # of --model
    local_share: float | None = None  # of weight pages, on the NUMA node that reads them


class Case(Struct, frozen=True):
    """One configuration to measure; it becomes one row."""

    engine: str
    method: str
    shape: Shape
    routing: str
    rank: int
    tokens: int
    threads: int
    isa: str
    parts: int = 1
    layer: int | None = None
    local_share: float | None = None

    @property
    def operations(self) -> tuple[int, int]:
        """Multiplications and additions of one token in one expert, of forward and backward: the
        latter has one product with each base matrix, for the gradient of its input, and two with
        each LoRA matrix."""
        shape = self.shape
        lora = shape.activation.products * 2 * self.rank * (shape.hidden + shape.intermediate)
        return shape.operations + lora, shape.operations + 2 * lora


class Checked(Struct, frozen=True):
    """Findings of the check of one step."""

    errors: Mapping[str, float]
    kernel_errors: Mapping[str, float] = field(default_factory=dict)
    bounds: Mapping[str, float] = field(default_factory=dict)  # of the latter
    saved_bytes: int | None = None
    scratch_bytes: int | None = None

    @property
    def beyond(self) -> list[str]:
        """Names of errors that exceed their bounds, or are NaN."""
        bounds, errors = self.bounds, self.kernel_errors
        return [name for name, error in errors.items() if not error <= bounds[name]]


def judge(
    case: Case, times: Times, pairs: float, checked: Checked, around: Sequence[Limits]
) -> Row:
    """`pairs` of token and expert that a step computes; `around`: limits from before and after
    the row and the best of the run, of which arithmetic's is the highest (see bench.rows.judge)."""
    peak = max(limits.bf16_gflops for limits in around)
    counts = [pairs * each for each in case.operations]
    forward, backward = (
        _timing(seconds, count, peak)
        for seconds, count in zip((times.forward, times.backward), counts, strict=True)
    )
    return Row(
        **same_facts(case, Row),
        forward=forward,
        backward=backward,
        steps=len(times.forward),
        **asdict(checked),
        beyond_bound=checked.beyond,
        peak_gflops=peak,
        disturbed=forward.wide or backward.wide or around[0].drift(around[1], "bf16") > DRIFT,
    )


def _timing(seconds: Sequence[float], operations: float, peak: float) -> Timing:
    p10, median, p90 = (float(np.percentile(seconds, p)) for p in (10, 50, 90))
    rate = operations / median / 1e9
    return Timing(median * 1e6, p10 * 1e6, p90 * 1e6, rate, rate / peak)
