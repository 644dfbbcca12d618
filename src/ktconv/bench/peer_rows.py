"""Rows of other implementations, on the same weights and routings as ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from ktconv import native
from ktconv.bench.cases import Session, different_experts, from_cache
from ktconv.bench.peers.base import PeerError
from ktconv.bench.peers.launch import measure
from ktconv.bench.peers.request import Request, Result
from ktconv.bench.peers.table import PEERS, Spec, chosen, fit
from ktconv.bench.presets import Shape
from ktconv.bench.rows import Case, Errors, Row, Sample, judge
from ktconv.formats import Format
from ktconv.system.pool import Pool
from ktconv.system.units import counted


def peer_rows(
    session: Session, shape: Shape, methods: Sequence[Format], ours: Sequence[Row]
) -> Iterator[Row]:
    """Rows of every installed peer with weights like those of one of our methods, with their time
    over that of `ours`.

    A peer that is missing or fails is left out with a message. Limits are those of this machine's
    highest level, because a peer uses what it finds, whatever level was asked for.
    """
    native.use_isa(native.isa_available()[-1])
    for spec in chosen(PEERS.values(), [method.key for method in methods], session.notify):
        if not fit(spec.methods[0], shape, copies=2):  # while the peer builds its weights
            session.notify(f"{spec.name}: left out, too little memory is free")
            continue
        for pool in session.pools.values():
            for row in _measured(session, spec, shape, pool):
                yield replace(row, times_ours=_times_ours(row, spec, ours))


def _times_ours(row: Row, spec: Spec, ours: Sequence[Row]) -> float | None:
    """The peer's median over that of our row for the same work: the first of the peer's methods
    that was measured, at the level that is fastest."""
    for method in spec.methods:
        same = [
            one.median_us
            for one in ours
            if (one.method, one.tokens, one.threads) == (method, row.tokens, row.threads)
        ]
        if same:
            return row.median_us / min(same)
    return None


def _measured(session: Session, spec: Spec, shape: Shape, pool: Pool) -> Iterator[Row]:
    request, meter = session.request, session.meter
    asked = Request(
        peer=spec.name,
        shape=shape,
        routing=request.routing.text,
        tokens=request.tokens,
        threads=pool.threads,
        effort=request.effort,
        seed=request.seed,
        different=different_experts(shape),
    )
    session.notify(f"{shape.name}, {spec.name}: {counted(pool.threads, 'thread')}")
    before = meter.again(pool)
    results: list[Result] = []
    try:
        results.extend(measure(asked))
    except PeerError as error:
        session.notify(f"{spec.name}: left out, {error}")
    around = before, meter.again(pool)
    for result in results:
        sample = Sample(tuple(result.seconds), result.pairs, result.distinct)
        errors = Errors(result.relative_error, result.source_error)
        row = judge(_case(spec, asked, result), sample, *around, errors, meter.best(pool))
        yield replace(row, detail=result.detail)


def _case(spec: Spec, asked: Request, result: Result) -> Case:
    engine, _, method = spec.name.partition(" ")
    return Case(
        engine=engine,
        method=method,
        unit=spec.unit,
        shape=asked.shape,
        routing=asked.routing,
        tokens=result.tokens,
        threads=asked.threads,
        isa="own",
        parts=1,
        expert_bytes=result.expert_bytes,
        in_cache=from_cache(result.expert_bytes, asked.shape),
    )
