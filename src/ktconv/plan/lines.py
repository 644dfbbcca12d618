"""A plan as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ktconv.plan.placement.balance import evenness
from ktconv.plan.planned import Planned
from ktconv.plan.split import hot_share
from ktconv.system.text import table_lines
from ktconv.system.units import counted, format_ranges, format_size


def lines_of(planned: Planned) -> Iterator[str]:
    """Lines of a plan: what was planned, who holds what, balance, the CPU's side, warnings."""
    model, request = planned.model, planned.request
    indices = format_ranges([layer.index for layer in model.layers])
    counts = sorted({layer.experts for layer in model.layers})
    several = "".join(f"{count} or " for count in counts[:-1])
    yield (
        f"{model.path}: layers {indices} of {several}{counted(counts[-1], 'expert')}, "
        f"{model.count} in all; other tensors {format_size(model.other_bytes)}"
    )
    yield f"load: {planned.load.words}"
    yield _placement(planned)
    yield ""
    yield from table_lines(_rank_rows(planned))
    yield ""
    if request.ep > 1:
        yield from _balance(planned)
    if request.splits:
        yield (
            f"GPU: {planned.gpu_experts} of {counted(model.count, 'expert')}, which take "
            f"{100 * hot_share(planned.layers):.1f} % of the load"
        )
    yield from _cpu(planned)
    for warning in planned.warnings:
        yield f"warning: {warning}"


def _placement(planned: Planned) -> str:
    request = planned.request
    words = [f"{request.ep * request.tp} GPU{'s' * (request.ep * request.tp > 1)}"]
    if request.ep > 1 or request.placed == "balanced":
        words.append(f"experts shared out {request.placed.replace('_', ' ')} over {request.ep}")
    if request.redundant:
        words.append(f"{counted(request.redundant, 'copy')} in each layer")
    if request.nodes > 1:
        words.append(f"{request.nodes} nodes")
    if request.tp > 1:
        words.append(f"each expert cut into {request.tp}")
    return "placement: " + ", ".join(words)


def _rank_rows(planned: Planned) -> Iterator[tuple[str, ...]]:
    """A row per rank, whose GPUs all hold as much."""
    tp, other = planned.request.tp, planned.model.other_bytes
    yield "GPU", "experts", "bytes of experts", "other tensors", "together", "load"
    figures = zip(planned.rank_places, planned.rank_bytes, planned.rank_loads, strict=True)
    for rank, (places, nbytes, share) in enumerate(figures):
        yield (
            format_ranges(list(range(rank * tp, (rank + 1) * tp))),
            str(places),
            format_size(nbytes),
            format_size(other),
            format_size(nbytes + other),
            f"{100 * share:.1f} %",
        )


def _balance(planned: Planned) -> Iterator[str]:
    before, after = planned.evenness
    worst = min(planned.layers, key=lambda one: float(evenness(one.loads)))
    yield (
        f"balance (mean / largest load of ranks): {after:.3f}, linear without copies {before:.3f}; "
        f"worst layer {worst.layer.index}: {float(evenness(worst.loads)):.3f}, "
        f"linear {float(evenness(worst.loads_before)):.3f}"
    )


def _cpu(planned: Planned) -> Iterator[str]:
    cpu = planned.cpu
    if cpu is None:
        return
    nodes = counted(len(cpu.complete), "NUMA part")
    yield f"CPU: {cpu.method} in {nodes}, all experts: {_sizes(cpu.complete)}"
    if cpu.cold is not None:
        yield f"CPU: without those on GPUs (quantize-cpu --exclude-experts): {_sizes(cpu.cold)}"


def _sizes(parts: Sequence[int]) -> str:
    if len(parts) == 1:
        return format_size(parts[0])
    each = ", ".join(map(format_size, parts)) if len(set(parts)) > 1 else format_size(parts[0])
    return f"{each} on each node" if len(set(parts)) == 1 else f"{each} on the nodes"
