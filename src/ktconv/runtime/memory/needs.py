"""Memory of each NUMA node that weights take, and whether the node has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ktconv import native
from ktconv.errors import ResourceError, UsageError
from ktconv.formats import TensorId
from ktconv.system import machine
from ktconv.system.blocks import rounded
from ktconv.system.nodes import nodes
from ktconv.system.pool import Pool
from ktconv.system.units import format_size
from ktconv.targets.packed.weights import PackedWeights

MEMORY = ("auto", "map", "copy", "shared")
LINE = 64  # bytes; each tensor of a copy begins a cache line

Needs = Mapping[int | None, int]  # bytes by the system's number of the node; None: on any


def check_memory(memory: str) -> str:
    """The word itself; UsageError for one that is none of MEMORY."""
    if memory not in MEMORY:
        raise UsageError(f"memory {memory!r} is not known", f"choose from {', '.join(MEMORY)}")
    return memory


def readers(parts: int, pool: Pool) -> list[dict[int, float]]:
    """NUMA nodes whose threads compute each part, by the system's numbers, with their shares of the
    work. Threads that are not placed run on all CPUs of this process."""
    if not pool.placed:
        at = Counter(cpu.node for cpu in machine.topology())
        return [_shares(at)] * parts
    try:
        first = [native.part_node(part, parts, pool) for part in range(parts)]
    except ValueError as error:
        raise UsageError(str(error), "give a pool that is open") from None
    # With fewer parts than nodes, those up to the first of the next part compute one together.
    after = [*first[1:], pool.nodes] if parts < pool.nodes else [node + 1 for node in first]
    return [
        _shares({pool.os_nodes[node]: pool.threads_of[node] for node in range(begin, end)})
        for begin, end in zip(first, after, strict=True)
    ]


def _shares(counts: Mapping[int, int]) -> dict[int, float]:
    whole = sum(counts.values())
    return {node: count / whole for node, count in counts.items()}


def part_nodes(parts: int, pool: Pool) -> list[int | None]:
    """The system's number of the node that computes each part; None where any thread may, or those
    of several nodes do."""
    if not pool.placed:
        return [None] * parts
    return [next(iter(nodes)) if len(nodes) == 1 else None for nodes in readers(parts, pool)]


def tensors_of(packed: PackedWeights, layer: int, experts: Collection[int]) -> list[list[TensorId]]:
    """Tensors of each part, in the order of their files."""
    geometry = packed.geometry(layer)
    found: list[list[TensorId]] = [[] for _ in range(geometry.parts)]
    for tensor in geometry.tensors(layer):
        if tensor.expert in experts:
            found[tensor.part].append(tensor)

    def place(tensor: TensorId) -> tuple[str, int]:
        at = packed.place(tensor)
        return str(at.file), at.offset

    return [sorted(part, key=place) for part in found]


def part_size(packed: PackedWeights, tensors: Iterable[TensorId]) -> int:
    """Bytes of a part in a copy."""
    return sum(-(-packed.place(tensor).nbytes // LINE) * LINE for tensor in tensors)


def layer_needs(packed: PackedWeights, layer: int, experts: Collection[int], pool: Pool) -> Needs:
    """Memory that the weights of a layer take; see `Needs`."""
    parts = tensors_of(packed, layer, experts)
    sizes = [rounded(part_size(packed, part)) for part in parts]
    return needs_of(sizes, part_nodes(len(parts), pool))


def needs_of(sizes: Iterable[int], os_nodes: Iterable[int | None]) -> Needs:
    """Sums the sizes of parts by node."""
    found: Counter[int | None] = Counter()
    for size, node in zip(sizes, os_nodes, strict=True):
        found[node] += size
    return found


def shortage(needs: Needs) -> str:
    """Tells in words what memory is missing; empty where there is enough for all."""
    there = {node.number: node.available for node in nodes() if node.total}
    for node, size in needs.items():
        if node in there and size > there[node]:
            own = format_size(there[node])
            return f"{format_size(size)} on NUMA node {node}, which has {own} free"
    whole, free = sum(needs.values()), machine.available_memory()
    return f"{format_size(whole)}, but {format_size(free)} are free" if whole > free else ""


def expect_room(needs: Needs, what: str) -> None:
    """ResourceError where memory for a copy is missing."""
    if missing := shortage(needs):
        raise ResourceError(
            f"a copy of {what} takes {missing}",
            'give memory="map", which reads weights from their files',
        )
