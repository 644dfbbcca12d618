"""A measured row, and how it is judged."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from ktconv.bench.limits import Limits
from ktconv.bench.presets import Shape
from ktconv.runtime.layers.load import expert_activation_of

SPREAD = 1.5  # 90th percentile over median: beyond it, something else ran
_TAKEN = 0.02  # of the CPUs' time, by other processes or other machines
LOCAL = 0.95  # of the pages of weights: fewer on their NUMA node are a reason for being slow
DRIFT = 1.3  # of the machine's limits from before the row to after it

DIMENSIONS = ("hidden", "intermediate", "experts", "top_k")
Key = tuple[Any, ...]


class Sample(Struct, frozen=True):
    """The raw result of timing one configuration."""

    seconds: tuple[float, ...]  # of each iteration
    pairs: float  # (token, expert) pairs per iteration, on average
    distinct: float  # experts per iteration that had tokens, on average
    taken: float = 0.0  # share of the CPUs' time that others took


class Errors(Struct, frozen=True):
    """Errors of y, relative in the 2-norm, against float32 arithmetic."""

    relative: float  # on the same packed weights
    source: float | None = None  # on the weights before quantization, where they are known
    kernel: float | None = None  # on the packed weights, activations rounded as the kernel does


class Row(Struct, frozen=True):
    """A row of the report; its names never change. See docs/bench.schema.json."""

    method: str
    shape: dict[str, Any]
    routing: str
    tokens: int
    threads: int
    isa: str
    median_us: float
    p10_us: float
    p90_us: float
    iterations: int
    tokens_per_s: float
    weight_gb_s: float
    gops: float
    bound: str  # "memory" or "compute": whichever limit takes longer
    share_of_bound: float  # the larger of the two shares below
    tokens_per_expert: float
    distinct_experts: float
    relative_error: float  # these three: see Errors
    disturbed: bool
    engine: str = "ktconv"
    parts: int = 1
    layer: int | None = None  # of --model
    source_error: float | None = None
    kernel_error: float | None = None
    read_gb_s: float = 0.0  # the limits around this row
    peak_gops: float = 0.0
    unit: str = ""  # of the products that peak_gops is the limit of: "int8" or "bf16"
    share_of_memory: float = 0.0  # weight_gb_s over read_gb_s
    share_of_peak: float = 0.0  # gops over peak_gops
    in_cache: bool = False  # the layer fits into the caches: its share can exceed 100 %
    detail: str = ""  # of a peer: its build, or how it stores weights
    local_share: float | None = None  # of weight pages, on the NUMA node that reads them
    times_ours: float | None = None  # of a peer: its median over that of our row beside it
    old_median_us: float | None = None  # of --compare
    ratio: float | None = None  # new time over old
    regressed: bool | None = None

    @property
    def key(self) -> Key:
        """Equal for rows that can be compared."""
        return _key(self, self.shape)


class Case(Struct, frozen=True):
    """One configuration to measure; it becomes one row."""

    engine: str
    method: str
    unit: str  # of the limits: which kind of product is used
    shape: Shape
    routing: str
    tokens: int
    threads: int
    isa: str
    parts: int
    expert_bytes: int
    in_cache: bool
    layer: int | None = None  # of a model

    @property
    def key(self) -> Key:
        """The key of the row that this case becomes."""
        return _key(self, shape_facts(self.shape))


def _key(of: Row | Case, shape: dict[str, Any]) -> Key:
    sizes = (shape[name] for name in DIMENSIONS)
    run = (of.routing, of.tokens, of.threads, of.isa)
    return (of.engine, of.method, *sizes, *run, of.parts, of.layer)


def shape_facts(shape: Shape) -> dict[str, Any]:
    facts = {name: getattr(shape, name) for name in ("name", *DIMENSIONS)}
    return facts | {"activation": str(expert_activation_of(shape.activation))}


def same_facts(case: Struct, row: type[Struct]) -> dict[str, Any]:
    """Values that a case and its row have in common, by the names of fields."""
    facts = asdict(case)
    facts["shape"] = shape_facts(facts["shape"])
    return {name: facts[name] for name in row.__struct_fields__ if name in facts}


def judge(
    case: Case,
    sample: Sample,
    before: Limits,
    after: Limits,
    errors: Errors,
    best: Limits | None = None,
    local_share: float | None = None,
) -> Row:
    """The row of a case from its times. The limit of memory is the faster of those measured right
    before and after it, as it drifts where others use the machine. The limit of arithmetic does
    not drift: it is the `best` of the run, as other work can disturb a short measurement."""
    limits, shape, unit = before.best(after), case.shape, case.unit
    peak = max(limits.peak(unit), best.peak(unit) if best else 0.0)
    p10, median, p90 = (float(np.percentile(sample.seconds, p)) for p in (10, 50, 90))
    weights = sample.distinct * case.expert_bytes
    operations = sample.pairs * shape.operations
    memory = weights / (limits.read_gb_s * 1e9)
    compute = operations / (peak * 1e9)
    bound, least = ("memory", memory) if memory >= compute else ("compute", compute)
    return Row(
        **same_facts(case, Row),
        median_us=median * 1e6,
        p10_us=p10 * 1e6,
        p90_us=p90 * 1e6,
        iterations=len(sample.seconds),
        tokens_per_s=case.tokens / median,
        weight_gb_s=weights / median / 1e9,
        gops=operations / median / 1e9,
        bound=bound,
        share_of_bound=least / median,
        tokens_per_expert=sample.pairs / max(sample.distinct, 1e-9),
        distinct_experts=sample.distinct,
        relative_error=errors.relative,
        disturbed=(
            p90 > SPREAD * median or sample.taken > _TAKEN or before.drift(after, unit) > DRIFT
        ),
        source_error=errors.source,
        kernel_error=errors.kernel,
        read_gb_s=limits.read_gb_s,
        peak_gops=peak,
        share_of_memory=memory / median,
        share_of_peak=compute / median,
        local_share=local_share,
    )
