"""Memory that calls need while they run.

It belongs to a pool, as its threads' stacks do: calls on a pool come one after the other, so a
model of sixty layers needs one workspace and not sixty. Calls that wait for the pool have one each.
No result, argument or state lies in it between calls.
"""

from __future__ import annotations

from ktconv import native
from ktconv.system.arrays import Array
from ktconv.system.blocks import new_block
from ktconv.system.pool import Pool


def take(pool: Pool, size: int = 64) -> Array:
    """Memory for one call, aligned to 64: what is free, if that is at least `size` bytes."""
    try:
        memory = pool.workspaces.pop()  # pop and append are atomic
    except IndexError:
        return _made(pool, size)
    return memory if memory.nbytes >= size else _made(pool, size)


def _made(pool: Pool, size: int) -> Array:
    """On several NUMA nodes an equal part for each, which the calls' teams use."""
    if pool.nodes == 1:
        return native.aligned_bytes(size)
    memory = new_block(size)
    cuts = [size * node // pool.nodes for node in range(pool.nodes + 1)]
    for node in range(pool.nodes):
        pool.bind(memory[cuts[node] : cuts[node + 1]], node)
    return memory


def give(pool: Pool, memory: Array) -> None:
    """The end of a call."""
    pool.workspaces.append(memory)


def free_workspaces(pool: Pool | None = None) -> None:
    """Returns to the system what no call uses at the moment, of `pool` or of the shared one."""
    (pool or Pool.shared()).workspaces.clear()
