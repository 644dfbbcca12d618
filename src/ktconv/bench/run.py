"""From a request to a report: what `ktconv bench` does, callable without the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ktconv import machine, native
from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import Limits, measure_limits
from ktconv.bench.measure import Effort, check, make_batch, sample
from ktconv.bench.presets import Shape
from ktconv.bench.routing import Routing, check_trace, parse_routing
from ktconv.bench.rows import Row, judge
from ktconv.bench.weights import RandomWeights
from ktconv.errors import UsageError
from ktconv.moe import Experts, Method, open_experts, pack_experts
from ktconv.moe.experts import check_shape
from ktconv.native import Pool
from ktconv.units import format_size

SCHEMA = 1
_DIFFERENT = 4  # experts with weights of their own; the others are copies elsewhere in memory
_SHARE_OF_MEMORY = 0.8


@dataclass(frozen=True)
class Request:
    """Everything that `ktconv bench` was asked to measure."""

    methods: tuple[Method, ...]
    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    threads: tuple[int, ...]
    isas: tuple[str, ...]  # of native.isa_available()
    routing: Routing = field(default_factory=lambda: parse_routing("balanced"))
    model: Path | None = None  # measure this converted model's layer instead of random weights
    layer: int | None = None
    top_k: int | None = None  # of `model`
    experts: int | None = None
    parts: int = 1
    effort: Effort = field(default_factory=Effort)
    seed: int = 0


@dataclass
class Report:
    """Rows and what they are to be judged by; `facts()` is the JSON document."""

    machine: dict[str, Any]
    limits: list[Limits] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "machine": self.machine,
            "limits": {f"{limit.isa}-{limit.threads}": limit.facts() for limit in self.limits},
            "rows": [row.facts() for row in self.rows],
        }


def prepare(request: Request) -> Request:
    """The request with what was left open decided. Raises UsageError for the impossible."""
    if request.model is not None:
        return request
    shapes = tuple(_sized(shape, request.experts) for shape in request.shapes)
    for shape in shapes:
        check_trace(request.routing, shape.experts, shape.top_k)
        for method in request.methods:
            check_shape(method, shape.hidden, shape.intermediate, request.parts)
            _check_memory(method, shape, request.parts)
    return replace(request, shapes=shapes)


def _sized(shape: Shape, experts: int | None) -> Shape:
    if experts is None:
        return shape
    if experts < shape.top_k:
        raise UsageError(
            f"--experts {experts} is less than the {shape.top_k} that each token of "
            f"{shape.name} goes to"
        )
    return shape.with_experts(experts)


def _check_memory(method: Method, shape: Shape, parts: int) -> None:
    each = method.expert_bytes(shape.hidden, shape.intermediate, parts)
    different = 3 * 4 * shape.hidden * shape.intermediate * (_DIFFERENT + 1)  # as float32
    room = int(_SHARE_OF_MEMORY * machine.available_memory()) - different
    if each * shape.experts > room:
        fitting = max(0, room // each)
        way = f"--experts {fitting} would" if fitting >= shape.top_k else "no useful number would"
        raise UsageError(
            f"{shape.experts} experts of {shape.name} in {method.name} take "
            f"{format_size(each * shape.experts)}, more than this machine has free",
            f"{way} fit",
        )


def bench(request: Request, say: Callable[[str], None]) -> Report:
    """Measures. `say` hears what is being done, for people."""
    request = prepare(request)
    report = Report(fingerprint())
    pools = {threads: native.Pool(threads) for threads in request.threads}
    try:
        with _level_kept():
            limits = _all_limits(request, pools, say)
            report.limits = list(limits.values())
            for experts, shape in _all_experts(request, say):
                for row in _rows(request, experts, shape, pools, limits):
                    report.rows.append(row)
                    say(
                        f"  {row.isa}, {row.threads} threads, {row.tokens} tokens: "
                        f"{row.median_us:.0f} us"
                    )
    finally:
        for pool in pools.values():
            pool.close()
    return report


@contextmanager
def _level_kept() -> Iterator[None]:
    before = native.isa()
    try:
        yield
    finally:
        native.use_isa(before)


def _all_limits(
    request: Request, pools: dict[int, Pool], say: Callable[[str], None]
) -> dict[tuple[str, int], Limits]:
    found = {}
    for isa in request.isas:
        native.use_isa(isa)
        for threads, pool in pools.items():
            limit = found[isa, threads] = measure_limits(pool)
            say(
                f"{isa}, {threads} threads: memory {limit.read_gb_s:.1f} GB/s, "
                f"int8 {limit.int8_gops:.0f} GOPS, bf16 {limit.bf16_gflops:.0f} GFLOPS"
            )
    return found


def _all_experts(request: Request, say: Callable[[str], None]) -> Iterator[tuple[Experts, Shape]]:
    if request.model is not None:
        experts = open_experts(request.model, request.layer)
        top_k = min(request.top_k or 8, experts.count)
        name = f"{request.model.name}"
        shape = Shape(name, experts.hidden, experts.intermediate, experts.count, top_k)
        check_trace(request.routing, shape.experts, shape.top_k)
        say(f"{name}: {experts.method.name}, {experts.count} experts, {experts.parts} part(s)")
        yield experts, shape
        return
    for shape in request.shapes:
        source = RandomWeights(request.seed, shape.hidden, shape.intermediate)
        origins = [index % _DIFFERENT for index in range(shape.experts)]
        for method in request.methods:
            say(f"{shape.name}, {method.name}: packing {shape.experts} experts")
            yield (
                pack_experts(
                    method,
                    source.expert,
                    origins,
                    shape.hidden,
                    shape.intermediate,
                    parts=request.parts,
                    activation=shape.activation,
                ),
                shape,
            )


def _rows(
    request: Request,
    experts: Experts,
    shape: Shape,
    pools: dict[int, Pool],
    limits: dict[tuple[str, int], Limits],
) -> Iterator[Row]:
    for tokens in request.tokens:
        ids = request.routing.iterations(tokens, shape.experts, shape.top_k, request.seed)
        batch = make_batch(ids, tokens, shape.hidden, shape.top_k, request.seed, request.effort)
        pairs = tokens * shape.top_k
        for (isa, threads), limit in limits.items():
            native.use_isa(isa)
            pool = pools[threads]
            error = check(experts, batch, pool)
            yield judge(
                sample(experts, batch, pool, request.effort),
                limit,
                method=experts.method.name,
                unit=experts.method.unit,
                shape=shape,
                routing=request.routing.text,
                tokens=tokens,
                pairs=pairs,
                expert_bytes=experts.expert_bytes,
                operations=experts.operations(pairs),
                relative_error=error,
                parts=experts.parts,
            )
