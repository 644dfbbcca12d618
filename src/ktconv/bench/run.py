"""Runs `ktconv bench`, from a request to a report, callable without the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from math import isfinite
from typing import Any, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import asdict

from ktconv import native
from ktconv.bench.cases import Layer, Plan, Request, Session, different_experts, prepare
from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import Limits, Meter, NodeReads, level_kept
from ktconv.bench.measure import Batch, Reference, check, make_batch, sample
from ktconv.bench.rows import LOCAL, Case, Key, Row, judge
from ktconv.bench.weights import RandomWeights
from ktconv.runtime.layers import Experts, pack_experts
from ktconv.runtime.memory import residence_of
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.system.units import counted

SCHEMA = 1


AnyRow = TypeVar("AnyRow")  # of the forward, or of fine-tuning


class Report(Struct, Generic[AnyRow]):
    """Rows and what they are to be judged by; `facts()` is the JSON document."""

    machine: dict[str, Any]
    limits: list[Limits] = field(default_factory=list)
    rows: list[AnyRow] = field(default_factory=list)
    mode: str = ""  # of --mode; empty: the usual one
    nodes: NodeReads | None = None  # None: the machine has one NUMA node

    def facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **({"mode": self.mode} if self.mode else {}),
            "machine": self.machine,
            "numa": self.nodes and asdict(self.nodes),
            "limits": {f"{limit.isa}-{limit.threads}": asdict(limit) for limit in self.limits},
            "rows": [_facts(row) for row in self.rows],
        }


def _facts(row: Any) -> dict[str, Any]:
    """Facts with errors that are not finite as strings, since JSON has no such numbers."""
    facts = {
        name: asdict(one) if isinstance(one, Struct) else one for name, one in asdict(row).items()
    }
    for errors in facts.keys() & {"errors", "kernel_errors"}:
        facts[errors] = {
            name: error if isfinite(error) else str(error) for name, error in facts[errors].items()
        }
    return facts


def bench(
    request: Request, notify: Notify, expect: Callable[[list[Key]], None] | None = None
) -> Report[Row]:
    """Measures. `notify` gets what is being done, for people; `expect` the keys of the rows of
    ours that will be measured, and may raise before anything is."""
    plan = prepare(request, notify)
    if expect:
        expect([case.key for case in plan.cases])
    report = Report[Row](fingerprint())
    with ExitStack() as stack:
        pools = {threads: stack.enter_context(Pool(threads)) for threads in request.threads}
        stack.enter_context(level_kept())
        session = Session(request, pools, Meter(), notify)
        report.nodes = measure_machine(session)
        for row in _all_rows(session, plan):
            report.rows.append(row)
            notify(
                f"  {row.isa}, {counted(row.threads, 'thread')}, {counted(row.tokens, 'token')}: "
                f"{row.median_us:.0f} us, {row.share_of_memory:.0%} of memory, "
                f"{row.share_of_peak:.0%} of {row.unit}"
            )
        report.limits = list(session.meter.found.values())
    return report


def measure_machine(session: Session) -> NodeReads | None:
    """Measures the limits at all levels with all pools, and those between NUMA nodes."""
    found = session.meter.between_nodes(max(session.pools))
    for line in told_of_nodes(found):
        session.notify(line)
    for isa in session.request.isas:
        native.use_isa(isa)
        for threads, pool in session.pools.items():
            limit = session.meter.measure(pool)
            session.notify(
                f"{isa}, {counted(threads, 'thread')}: memory {limit.read_gb_s:.1f} GB/s, "
                f"int8 {limit.int8_gops:.0f} GOPS, bf16 {limit.bf16_gflops:.0f} GFLOPS"
            )
    return found


def told_of_nodes(found: NodeReads | None) -> Iterator[str]:
    """Sentences about reading between NUMA nodes."""
    if found is None:
        yield "one NUMA node: all memory is local"
        return
    for node, rates in found.read_gb_s.items():
        told = (
            f"{'not measured' if rate is None else f'{rate:.1f} GB/s'} from node {memory}"
            for memory, rate in rates.items()
        )
        yield (
            f"NUMA node {node}, {counted(found.threads[node], 'thread')}, reads memory: "
            f"{', '.join(told)}"
        )
    share = found.remote_share
    if share is not None:
        yield f"memory of another node is read at {share:.0%} of the local rate at least"


def _all_rows(session: Session, plan: Plan) -> Iterator[Row]:
    for shape, group in groupby(plan.layers, key=lambda layer: layer.shape):
        layers, ours = list(group), []
        for layer in layers:
            for row in _rows(session, layer):
                ours.append(row)
                yield row
        if session.request.peers:
            from ktconv.bench.peer_rows import peer_rows

            yield from peer_rows(session, shape, [layer.method for layer in layers], ours)


def _rows(session: Session, layer: Layer) -> Iterator[Row]:
    """There is memory for the experts of one layer at a time."""
    request, shape = session.request, layer.shape
    experts = layer.experts or packed(session, layer)
    local = {
        threads: local_share(session, layer, experts, pool)
        for threads, pool in session.pools.items()
    }
    for tokens, cases in groupby(layer.cases, key=lambda case: case.tokens):
        ids = layer.routings(request, tokens)
        batch = make_batch(ids, tokens, shape.hidden, shape.top_k, request.seed, request.effort)
        reference = Reference(experts, batch)
        for case in cases:
            native.use_isa(case.isa)
            yield _row(session, case, experts, batch, reference, local[case.threads])


def local_share(session: Session, layer: Layer, experts: Experts, pool: Pool) -> float | None:
    """Share of the weights' pages on the NUMA node whose threads read them, all of which are in
    memory afterwards; says so where it is not nearly all. None: the system does not say."""
    experts.layer.touch(pool)
    share = residence_of(experts.layer, pool, experts.held).local_share
    what = f"{layer.shape.name}, {layer.method.key}, {counted(pool.threads, 'thread')}"
    if share is None:
        session.notify(f"{what}: the system does not say on which NUMA nodes the weights lie")
    elif share < LOCAL:
        session.notify(
            f"warning: {what}: {share:.0%} of the weights' pages lie on the NUMA node whose "
            f"threads read them, the rest on others, which costs speed{_way_out(layer, pool)}"
        )
    return share


def _way_out(layer: Layer, pool: Pool) -> str:
    if not pool.placed or layer.parts >= pool.nodes:
        return ""
    if layer.experts is None:
        return f"; --numa {pool.nodes} cuts them into parts"
    return f"; ktconv reshard --numa {pool.nodes} cuts them into parts"


def packed(session: Session, layer: Layer) -> Experts:
    method, shape = layer.method, layer.shape
    session.notify(f"{shape.name}, {method.key}: packing {counted(shape.experts, 'expert')}")
    source = RandomWeights(session.request.seed, shape.hidden, shape.intermediate)
    most = session.pools[max(session.pools)]
    return pack_experts(
        method,
        source.expert if shape.activation.gated else source.ungated,
        [index % different_experts(shape) for index in range(shape.experts)],
        shape.hidden,
        shape.intermediate,
        parts=layer.parts,
        activation=shape.activation,
        bind=lambda memory, part: most.bind(memory, native.part_node(part, layer.parts, most)),
    )


def _row(
    session: Session,
    case: Case,
    experts: Experts,
    batch: Batch,
    reference: Reference,
    local_share: float | None,
) -> Row:
    pool, meter = session.pools[case.threads], session.meter
    errors = check(experts, batch, reference, pool)
    before = meter.again(pool)
    measured = sample(experts, batch, pool, session.request.effort)
    after = meter.again(pool)
    return judge(case, measured, before, after, errors, meter.best(pool), local_share)
