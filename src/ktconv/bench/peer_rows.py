"""Rows of other implementations, on the same weights and routings as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ktconv import native
from ktconv.bench.limits import Meter
from ktconv.bench.measure import Effort
from ktconv.bench.peers import PeerError, Request, Result, Spec, available, measure
from ktconv.bench.presets import Shape
from ktconv.bench.rows import Errors, Row, Sample, Subject, judge
from ktconv.moe import Method, method_named
from ktconv.system import machine
from ktconv.system.pool import Pool

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What our own rows were measured with."""

    shape: Shape
    methods: Sequence[Method]
    routing: str
    tokens: tuple[int, ...]
    effort: Effort
    seed: int
    different: int  # experts with weights of their own
    cache_bytes: int  # a layer smaller than this does not come from memory


def peer_rows(
    setting: Setting, pools: dict[int, Pool], meter: Meter, say: Say, isa: str
) -> Iterator[Row]:
    """Of every peer that is installed and has weights like those of one of our methods.

    A peer that is missing or fails is told and left out: it is not ours to judge. Limits are
    measured at `isa`.
    """
    native.use_isa(isa)
    for spec in chosen(setting.methods, say):
        if not _fits(spec, setting.shape):
            say(f"{spec.name}: left out, too little memory is free")
            continue
        for threads, pool in pools.items():
            yield from _measured(spec, setting, threads, pool, meter, say)


def chosen(methods: Sequence[Method], say: Say) -> list[Spec]:
    """The peers for these methods that can be measured; says why the others cannot."""
    names = {method.name for method in methods}
    found, missing = [], set()
    for peer in available():
        if not names.intersection(peer.spec.methods):
            continue
        if peer.reason:
            missing.add(peer.reason)
        else:
            found.append(peer.spec)
    for reason in sorted(missing):
        say(f"peers: {reason}")
    return found


def _fits(spec: Spec, shape: Shape) -> bool:
    """As packed weights, with as many once more while it builds them."""
    method = method_named(spec.methods[0])
    each = method.expert_bytes(shape.hidden, shape.intermediate)
    return 2 * each * shape.experts < machine.available_memory()


def _measured(
    spec: Spec, setting: Setting, threads: int, pool: Pool, meter: Meter, say: Say
) -> Iterator[Row]:
    request = Request(
        peer=spec.name,
        shape=setting.shape,
        routing=setting.routing,
        tokens=setting.tokens,
        threads=threads,
        effort=setting.effort,
        seed=setting.seed,
        different=setting.different,
    )
    say(f"{setting.shape.name}, {spec.name}: {threads} threads")
    before = meter.again(pool)
    results: list[Result] = []
    try:
        results.extend(measure(request))
    except PeerError as error:
        say(f"{spec.name}: left out, {error}")
    around = before, meter.again(pool)
    for result in results:
        subject, sample, errors = _outcome(spec, setting, result)
        yield judge(subject, sample, *around, errors, meter.best(pool))


def _outcome(spec: Spec, setting: Setting, result: Result) -> tuple[Subject, Sample, Errors]:
    engine, _, method = spec.name.partition(" ")
    subject = Subject(
        engine=engine,
        method=method,
        unit=spec.unit,
        shape=setting.shape,
        routing=setting.routing,
        tokens=result.tokens,
        parts=1,
        expert_bytes=result.expert_bytes,
        in_cache=result.expert_bytes * setting.shape.experts < setting.cache_bytes,
        isa="own",
    )
    sample = Sample(result.seconds, result.pairs, result.distinct)
    return subject, sample, Errors(result.relative_error, result.source_error)
