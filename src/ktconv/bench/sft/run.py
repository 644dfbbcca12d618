"""Runs `ktconv bench --mode sft`, from a request to a report, callable without the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product

from ktconv.bench.cases import Layer, Session
from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import Meter, level_kept
from ktconv.bench.run import Report, local_share, measure_machine, packed
from ktconv.bench.sft.bout import Bout, rows_of
from ktconv.bench.sft.cases import Request, prepare
from ktconv.bench.sft.inputs import make_inputs
from ktconv.bench.sft.rows import Row
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.system.threads import torch_threads
from ktconv.system.units import counted


def bench(request: Request, notify: Notify) -> Report[Row]:
    """Measures. `notify` gets what is being done, for people. UsageError, before anything is
    measured, for what is impossible or does not fit into memory."""
    groups, report = prepare(request, notify), Report[Row](fingerprint(), mode="sft")
    with ExitStack() as stack:
        pools = {n: stack.enter_context(Pool(n)) for n in request.layers.threads}
        stack.enter_context(level_kept())
        session = Session(request.layers, pools, Meter(), notify)
        report.nodes = measure_machine(session)
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
        local = [local_share(session, *one, pool) for one in both]
        ids = layers[0].routings(request, tokens)
        inputs = make_inputs(ids, tokens, shape, both[0][1].count, rank, request.seed)
        with torch_threads(threads):
            yield from rows_of(Bout(session, both, inputs, rank, pool, local))
