"""A measured row, and how it is judged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ktconv.bench.limits import Limits
from ktconv.bench.presets import Shape

_SPREAD = 1.5  # of the 90th percentile over the median: more, and something else ran
_STOLEN = 0.02  # of the time, by other machines or other processes


@dataclass(frozen=True, slots=True)
class Sample:
    """The raw result of timing one configuration."""

    seconds: tuple[float, ...]  # of each iteration
    distinct: float  # experts per iteration that had tokens, on average
    stolen: float  # share of the time that others took


@dataclass(frozen=True, slots=True)
class Row:
    """Names that scripts rely on: add freely, rename never (docs: design of the JSON)."""

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
    share_of_bound: float
    tokens_per_expert: float
    distinct_experts: float
    relative_error: float
    disturbed: bool
    parts: int = 1

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows comparable."""
        dims = (self.shape[name] for name in ("hidden", "intermediate", "experts", "top_k"))
        return (self.method, *dims, self.routing, self.tokens, self.threads, self.isa, self.parts)


def shape_facts(shape: Shape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "top_k": shape.top_k,
    }


def judge(
    sample: Sample,
    limits: Limits,
    *,
    method: str,
    unit: str,
    shape: Shape,
    routing: str,
    tokens: int,
    pairs: int,
    expert_bytes: int,
    operations: int,
    relative_error: float,
    parts: int,
) -> Row:
    """From times to a row. `operations` are those of `pairs` (token, expert) pairs."""
    p10, median, p90 = (float(np.percentile(sample.seconds, p)) for p in (10, 50, 90))
    weights = sample.distinct * expert_bytes
    memory = weights / (limits.read_gb_s * 1e9)
    compute = operations / (limits.peak(unit) * 1e9)
    return Row(
        method=method,
        shape=shape_facts(shape),
        routing=routing,
        tokens=tokens,
        threads=limits.threads,
        isa=limits.isa,
        median_us=median * 1e6,
        p10_us=p10 * 1e6,
        p90_us=p90 * 1e6,
        iterations=len(sample.seconds),
        tokens_per_s=tokens / median,
        weight_gb_s=weights / median / 1e9,
        gops=operations / median / 1e9,
        bound="memory" if memory >= compute else "compute",
        share_of_bound=max(memory, compute) / median,
        tokens_per_expert=pairs / max(sample.distinct, 1e-9),
        distinct_experts=sample.distinct,
        relative_error=relative_error,
        disturbed=p90 > _SPREAD * median or sample.stolen > _STOLEN,
        parts=parts,
    )
