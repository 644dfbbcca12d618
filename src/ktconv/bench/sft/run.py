"""Runs `ktconv bench --mode sft`, from a request to a report, callable without the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from math import isfinite
from typing import Any

from ktconv.bench.cases import Layer, Session
from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import Limits, Meter, level_kept
from ktconv.bench.run import measure_machine, packed
from ktconv.bench.sft.bout import Bout, rows_of
from ktconv.bench.sft.cases import Request, prepare
from ktconv.bench.sft.inputs import make_inputs
from ktconv.bench.sft.rows import Row
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.system.units import counted
from ktconv.train.gradients import torch_threads

SCHEMA = 1


@dataclass
class Report:
    """Rows and what they are to be judged by; `facts()` is the JSON document."""

    machine: dict[str, Any]
    limits: list[Limits] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "mode": "sft",
            "machine": self.machine,
            "limits": {f"{limit.isa}-{limit.threads}": asdict(limit) for limit in self.limits},
            "rows": [_facts(row) for row in self.rows],
        }


def _facts(row: Row) -> dict[str, Any]:
    """Facts with errors that are not finite as strings, since JSON has no such numbers."""
    facts = asdict(row)
    for errors in (facts["errors"], facts["kernel_errors"]):
        odd = {name: str(error) for name, error in errors.items() if not isfinite(error)}
        errors.update(odd)
    return facts


def bench(request: Request, notify: Notify) -> Report:
    """Measures. `notify` gets what is being done, for people. UsageError, before anything is
    measured, for what is impossible or does not fit into memory."""
    groups, report = prepare(request, notify), Report(fingerprint())
    with ExitStack() as stack:
        pools = {n: stack.enter_context(Pool(n)) for n in request.layers.threads}
        stack.enter_context(level_kept())
        session = Session(request.layers, pools, Meter(), notify)
        measure_machine(session)
        for layers in groups:
            for row in _rows(session, layers, request.ranks):
                report.rows.append(row)
                notify(
                    f"  {row.engine} {row.method}, {row.isa}, {counted(row.threads, 'thread')}, "
                    f"{counted(row.tokens, 'token')}, rank {row.rank}: "
                    f"{row.forward.median_us / 1e3:.1f} ms "
                    f"forward, {row.backward.median_us / 1e3:.1f} ms backward"
                )
        report.limits = list(session.meter.found.values())
    return report


def _rows(session: Session, layers: Sequence[Layer], ranks: Sequence[int]) -> Iterator[Row]:
    """All methods of a shape are in memory, so that they can take turns."""
    request, shape = session.request, layers[0].shape
    both = [(layer, layer.experts or packed(session, layer)) for layer in layers]
    for tokens, threads, rank in product(request.tokens, request.threads, ranks):
        pool = session.pools[threads]
        for _, experts in both:
            experts.layer.touch(pool)
        ids = layers[0].routings(request, tokens)
        inputs = make_inputs(ids, tokens, shape, both[0][1].count, rank, request.seed)
        with torch_threads(threads):
            yield from rows_of(Bout(session, both, inputs, rank, pool))
