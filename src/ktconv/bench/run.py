"""From a request to a report: what `ktconv bench` does, callable without the command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ktconv import native
from ktconv.bench.fingerprint import fingerprint, largest_cache
from ktconv.bench.limits import Limits, Meter, read_size
from ktconv.bench.measure import (
    Batch,
    Effort,
    Truth,
    batch_bytes,
    check,
    kept_routings,
    make_batch,
    sample,
)
from ktconv.bench.presets import Shape
from ktconv.bench.routing import (
    Ids,
    Routing,
    check_replay,
    check_trace,
    only_here,
    parse_routing,
)
from ktconv.bench.rows import Key, Row, Subject, judge
from ktconv.bench.weights import RandomWeights
from ktconv.errors import UsageError
from ktconv.moe import Experts, Method, experts_per_token, pack_experts
from ktconv.moe.experts import check_shape
from ktconv.moe.load import open_layer
from ktconv.system import machine
from ktconv.system.pool import Pool
from ktconv.system.text import path_text, printable
from ktconv.system.units import format_size

Say = Callable[[str], None]

SCHEMA = 1
_DIFFERENT = 4  # experts with weights of their own; the others are copies elsewhere in memory
_DIFFERENT_IF_LARGE, _LARGE = 2, 1 << 22  # elements of a matrix
_WORKING_COPIES = 4  # of an expert as float32, while it is quantized
_SHARE_OF_MEMORY = 0.8
_CACHES = 2  # a layer must be larger than so many last-level caches to come from memory


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
    skip: bool = False  # leave out methods that cannot hold a shape, instead of refusing
    peers: bool = False  # other implementations too, where they are installed


@dataclass(frozen=True)
class Layer:
    """How to make it: there is memory for one at a time. `number`: of a model."""

    make: Callable[[], Experts]
    method: Method
    shape: Shape
    parts: int
    number: int | None = None
    here: Ids | None = None  # of a model that lacks experts: those that it has


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


# ---- what is possible ----


def prepare(request: Request) -> Request:
    """The request with what was left open decided. Raises UsageError for the impossible."""
    if request.model is not None:
        if request.peers:
            raise UsageError("peers cannot read converted models", "leave --model or --peers out")
        return request
    shapes = tuple(_sized(shape, request.experts) for shape in request.shapes)
    request = replace(request, shapes=shapes)
    for shape in shapes:
        check_trace(request.routing, shape.experts, shape.top_k)
        _check_replays(request, shape)
        for method in _methods_for(request, shape):
            check_shape(method, shape.hidden, shape.intermediate, request.parts)
        _check_memory(request, shape)
    return request


def _check_replays(request: Request, shape: Shape) -> None:
    for tokens in request.tokens:
        kept = kept_routings(tokens, shape.top_k, request.effort)
        check_replay(request.routing, tokens * kept)


def _methods_for(request: Request, shape: Shape) -> list[Method]:
    """All methods that were asked for, without those that may be skipped and cannot hold it."""
    sizes = (shape.hidden, shape.intermediate, request.parts)
    able = [method for method in request.methods if method.holds(*sizes)]
    return able if request.skip and able else list(request.methods)


def _sized(shape: Shape, experts: int | None) -> Shape:
    if experts is None:
        return shape
    if experts < shape.top_k:
        raise UsageError(
            f"--experts {experts} is less than the {shape.top_k} that each token of "
            f"{shape.name} goes to",
            f"give at least {shape.top_k}",
        )
    if experts > shape.experts:
        raise UsageError(
            f"--experts {experts} is more than the {shape.experts} of {shape.name}",
            "leave it out to use them all",
        )
    return shape.with_experts(experts)


def _check_memory(request: Request, shape: Shape) -> None:
    """The layer of every method must fit, with what a batch of the most tokens needs."""
    as_numbers = 3 * 4 * shape.hidden * shape.intermediate
    working = as_numbers * (_different(shape) + _WORKING_COPIES) + read_size()
    room = _check_batch_memory(request, shape, request.parts, working)
    per_expert = _drawn_bytes(request)
    sizes = {
        method: method.expert_bytes(shape.hidden, shape.intermediate, request.parts)
        for method in _methods_for(request, shape)
    }
    method = max(sizes, key=lambda method: sizes[method])
    each = sizes[method]
    if (each + per_expert) * shape.experts > room:
        fitting = max(0, room // (each + per_expert))
        way = f"--experts {fitting} would" if fitting >= shape.top_k else "no useful number would"
        raise UsageError(
            f"{shape.experts} experts of {shape.name} in {method.name} take "
            f"{format_size(each * shape.experts)}, more than this machine has free",
            f"{way} fit",
        )


def _check_batch_memory(request: Request, shape: Shape, parts: int, working: int = 0) -> int:
    """Bytes left for the experts beside `working` and the largest batch; UsageError if none."""
    free = int(_SHARE_OF_MEMORY * machine.available_memory()) - working
    tokens = max(request.tokens)
    batch = batch_bytes(tokens, shape.hidden, shape.top_k, request.effort)
    batch += scratch_bytes(shape, parts, tokens, max(request.threads))
    routing = _drawn_bytes(request) * shape.experts
    if batch + routing > free and batch + routing > working:
        raise UsageError(
            f"{tokens} tokens of {shape.name} take {format_size(batch + routing)}, more than "
            "this machine has free",
            "give fewer --tokens",
        )
    return free - batch


def _drawn_bytes(request: Request) -> int:
    """Per expert: a routing is drawn by sorting random numbers, one per token and expert."""
    draws = request.routing.kind in ("balanced", "zipf")
    return 3 * 8 * max(request.tokens) if draws else 0


def scratch_bytes(shape: Shape, parts: int, tokens: int, threads: int) -> int:
    """kt_moe_scratch_size at most, of layers that are not made yet; see native/src/moe/forward.c.

    Rows of activations take two bytes each at most, with a line or two for scales.
    """
    most = min(tokens, 2048)
    slots, width = most * shape.top_k, shape.intermediate // parts
    x_row, middle_row = 2 * shape.hidden + 256, 2 * width + 256
    team = most * x_row + slots * (4 * width + middle_row)
    thread = 96 * x_row + 4 * shape.hidden + (1 << 20)
    partial = 4 * most * shape.hidden
    return parts * (team + partial) + threads * thread + 32 * (slots + shape.experts) + (1 << 20)


def _different(shape: Shape) -> int:
    large = shape.hidden * shape.intermediate > _LARGE
    return min(shape.experts, _DIFFERENT_IF_LARGE if large else _DIFFERENT)


# ---- measuring ----


def bench(request: Request, say: Say, expect: Callable[[list[Key]], None] | None = None) -> Report:
    """Measures. `say` hears what is being done, for people; `expect` which rows of ours will be
    measured, and may raise before anything is."""
    request = prepare(request)
    opened = None if request.model is None else _opened(request, request.model, say)
    if expect:
        expect(_planned(request, opened))
    report = Report(fingerprint())
    with ExitStack() as stack:
        pools = {threads: stack.enter_context(Pool(threads)) for threads in request.threads}
        stack.enter_context(_level_kept())
        meter = Meter()
        _measure_machine(request, meter, pools, say)
        layers = _packed_layers(request, pools, say) if opened is None else [opened]
        for rows in _all_rows(request, layers, pools, meter, say):
            for row in rows:
                report.rows.append(row)
                say(_progress(row))
        report.limits = list(meter.found.values())
    return report


def _progress(row: Row) -> str:
    return (
        f"  {row.isa}, {row.threads} threads, {row.tokens} tokens: {row.median_us:.0f} us, "
        f"{row.share_of_bound:.0%} of {row.bound}"
    )


def _all_rows(
    request: Request, layers: Iterable[Layer], pools: dict[int, Pool], meter: Meter, say: Say
) -> Iterator[Iterator[Row]]:
    for layer in layers:
        yield _rows(request, layer, pools, meter)
    if request.peers:
        for shape in request.shapes:
            yield _peer_rows(request, shape, pools, meter, say)


def _planned(request: Request, opened: Layer | None) -> list[Key]:
    layers = [opened] if opened else [_unmade(request, *pair) for pair in _pairs(request)]
    return [
        _subject(layer, request.routing.text, tokens).key(threads, isa)
        for layer in layers
        for tokens in request.tokens
        for isa in request.isas
        for threads in request.threads
    ]


def _pairs(request: Request) -> Iterator[tuple[Method, Shape]]:
    for shape in request.shapes:
        for method in _methods_for(request, shape):
            yield method, shape


def _unmade(
    request: Request, method: Method, shape: Shape, pools: dict[int, Pool] | None = None
) -> Layer:
    make = partial(_packed, request, method, shape, pools or {})
    return Layer(make, method, shape, request.parts)


@contextmanager
def _level_kept() -> Iterator[None]:
    before = native.isa()
    try:
        yield
    finally:
        native.use_isa(before)


def _measure_machine(request: Request, meter: Meter, pools: dict[int, Pool], say: Say) -> None:
    for isa in request.isas:
        native.use_isa(isa)
        for threads, pool in pools.items():
            limit = meter.measure(pool)
            say(
                f"{isa}, {threads} threads: memory {limit.read_gb_s:.1f} GB/s, "
                f"int8 {limit.int8_gops:.0f} GOPS, bf16 {limit.bf16_gflops:.0f} GFLOPS"
            )


def _packed_layers(request: Request, pools: dict[int, Pool], say: Say) -> Iterator[Layer]:
    for shape in request.shapes:
        methods = _methods_for(request, shape)
        left_out = [method.name for method in request.methods if method not in methods]
        if left_out:
            say(f"{shape.name} cannot be held by {', '.join(left_out)}: left out")
        for method in methods:
            say(f"{shape.name}, {method.name}: packing {shape.experts} experts")
            yield _unmade(request, method, shape, pools)


def _packed(request: Request, method: Method, shape: Shape, pools: dict[int, Pool]) -> Experts:
    source = RandomWeights(request.seed, shape.hidden, shape.intermediate)
    origins = [index % _different(shape) for index in range(shape.experts)]
    most = pools[max(pools)]
    return pack_experts(
        method,
        source.expert,
        origins,
        shape.hidden,
        shape.intermediate,
        parts=request.parts,
        activation=shape.activation,
        bind=lambda memory, part: most.bind(memory, home(part, request.parts, most.nodes)),
    )


def home(part: int, parts: int, nodes: int) -> int:
    """The first of the nodes whose threads compute a part, as native/src/moe/forward.c deals them
    out: nodes form as many teams as there are parts, if there are more nodes than parts."""
    teams = min(parts, nodes)
    return -(-(part * teams // parts) * nodes // teams)


def _opened(request: Request, model: Path, say: Say) -> Layer:
    (number, experts) = open_layer(model, request.layer)
    name = printable(path_text(model.resolve().name))
    here = np.flatnonzero(experts.origins >= 0)
    count = len(here)
    top_k = request.top_k or min(experts_per_token(model, number), count)
    if top_k > count:
        raise UsageError(
            f"--top-k {top_k} is more than the {count} experts of {model}",
            f"give at most {count}",
        )
    shape = Shape(name, experts.hidden, experts.intermediate, count, top_k, experts.activation)
    check_trace(request.routing, experts.count, shape.top_k, of_model=True)
    _check_replays(replace(request, routing=only_here(request.routing, here)), shape)
    if _check_batch_memory(request, shape, experts.parts, read_size()) < 0:
        raise UsageError(
            f"measuring memory takes {format_size(read_size())}, more than this machine has free"
        )
    say(f"{name}: {experts.method.name}, {count} experts, {experts.parts} part(s)")
    lacking = here if count < experts.count else None
    return Layer(lambda: experts, experts.method, shape, experts.parts, number, lacking)


def _ids(request: Request, layer: Layer, tokens: int) -> Iterator[Ids]:
    """Chosen among the experts that are here; recorded ids of others are -1, which is skipped."""
    shape, here = layer.shape, layer.here
    routing = request.routing if here is None else only_here(request.routing, here)
    ids = routing.iterations(tokens, shape.experts, shape.top_k, request.seed)
    return ids if here is None or routing.trace is not None else (here[drawn] for drawn in ids)


def _rows(request: Request, layer: Layer, pools: dict[int, Pool], meter: Meter) -> Iterator[Row]:
    experts, shape = layer.make(), layer.shape
    for pool in pools.values():
        experts.layer.touch(pool)
    for tokens in request.tokens:
        ids = _ids(request, layer, tokens)
        batch = make_batch(ids, tokens, shape.hidden, shape.top_k, request.seed, request.effort)
        truth = Truth(experts, batch)
        subject = _subject(layer, request.routing.text, tokens)
        for isa in request.isas:
            native.use_isa(isa)
            for pool in pools.values():
                yield _row(subject, experts, batch, truth, pool, meter, request.effort)


def _peer_rows(
    request: Request, shape: Shape, pools: dict[int, Pool], meter: Meter, say: Say
) -> Iterator[Row]:
    from ktconv.bench.peer_rows import Setting, peer_rows

    setting = Setting(
        shape=shape,
        methods=_methods_for(request, shape),
        routing=request.routing.text,
        tokens=request.tokens,
        effort=request.effort,
        seed=request.seed,
        different=_different(shape),
        cache_bytes=_CACHES * largest_cache(),
    )
    return peer_rows(setting, pools, meter, say, isa=request.isas[-1])


def _subject(layer: Layer, routing: str, tokens: int) -> Subject:
    method, shape = layer.method, layer.shape
    each = method.expert_bytes(shape.hidden, shape.intermediate, layer.parts)
    return Subject(
        engine="ktconv",
        method=method.name,
        unit=method.unit,
        shape=shape,
        routing=routing,
        tokens=tokens,
        parts=layer.parts,
        expert_bytes=each,
        in_cache=each * shape.experts < _CACHES * largest_cache(),
        layer=layer.number,
    )


def _row(
    subject: Subject,
    experts: Experts,
    batch: Batch,
    truth: Truth,
    pool: Pool,
    meter: Meter,
    effort: Effort,
) -> Row:
    errors = check(experts, batch, truth, pool)
    before = meter.again(pool)
    measured = sample(experts, batch, pool, effort)
    after = meter.again(pool)
    return judge(subject, measured, before, after, errors, meter.best(pool))
