"""Runs `ktconv bench --mode sft`, from a request to a report, callable without the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product

from msgspec import Struct

from ktconv.bench import cases
from ktconv.bench.cases import Layer, Session
from ktconv.bench.fingerprint import fingerprint
from ktconv.bench.limits import Meter, level_kept
from ktconv.bench.run import Report, local_share, measure_machine, packed
from ktconv.bench.sft.bout import Bout, rows_of
from ktconv.bench.sft.inputs import make_inputs
from ktconv.bench.sft.rows import Row
from ktconv.errors import UsageError
from ktconv.system import machine
from ktconv.system.pool import Pool
from ktconv.system.text import Notify
from ktconv.system.threads import torch_threads
from ktconv.system.units import counted, format_size

_SHARE_OF_MEMORY = 0.8
# Bytes for each element: of LoRA matrices, which the call and the module have, with their gradients
# and those of the reference; of an expert's weights in fp32, read and multiplied with; of an
# expert's tokens in autograd, at most all; of what is saved for a token and an expert.
_OF_LORA, _OF_WEIGHTS, _OF_TOKENS, _OF_SAVED = 24, 12, 64, 10


class Request(Struct, frozen=True):
    """The settings of `ktconv bench --mode sft`: layers, and the ranks of LoRA."""

    layers: cases.Request
    ranks: tuple[int, ...] = (16,)


def prepare(request: Request, notify: Notify) -> list[list[Layer]]:
    """The layers of each shape, whose methods take turns. UsageError for what is impossible, or
    does not fit into this machine's memory."""
    groups: dict[str, list[Layer]] = {}
    for layer in cases.prepare(request.layers, notify).layers:
        groups.setdefault(layer.shape.name, []).append(layer)
    for layers in groups.values():
        _check_memory(request, layers)
    return list(groups.values())


def _check_memory(request: Request, layers: Sequence[Layer]) -> None:
    shape, tokens, rank = layers[0].shape, max(request.layers.tokens), max(request.ranks)
    hidden, inner, products = shape.hidden, shape.intermediate, shape.activation.products
    count = shape.experts if layers[0].experts is None else layers[0].experts.count
    packed = sum(layer.cases[0].expert_bytes * count for layer in layers if not layer.experts)
    lora = _OF_LORA * products * rank * (hidden + inner) * count
    work = tokens * (hidden + inner) * (_OF_TOKENS + _OF_SAVED * shape.top_k)
    work += _OF_WEIGHTS * products * hidden * inner
    if packed + lora + work > _SHARE_OF_MEMORY * machine.available_memory():
        sizes = f"{format_size(packed)} of weights, {format_size(lora)} of LoRA matrices"
        raise UsageError(
            f"{shape.name} takes {sizes} and {format_size(work)} for {counted(tokens, 'token')}, "
            "more than "
            "this machine has free",
            "give fewer --experts, --method, --rank or --tokens",
        )


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
