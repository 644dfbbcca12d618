"""Memory that calls need while they run.

It belongs to a pool, as its threads' stacks do: calls on a pool come one after the other, so a
model of sixty layers needs one workspace and not sixty. Calls that wait for the pool have one each.
No result, argument or state lies in it between calls.
"""

from __future__ import annotations

from ktconv import native
from ktconv.system.arrays import Array
from ktconv.system.blocks import new_block, rounded
from ktconv.system.nodes import HUGE_PAGE
from ktconv.system.pool import Pool


def take(pool: Pool, size: int = 64) -> Array:
    """Memory for one call, aligned to 64: what is free, if that is at least `size` bytes."""
    try:
        memory = pool.workspaces.pop()  # pop and append are atomic
    except IndexError:
        return made(pool, size)
    return memory if memory.nbytes >= size else made(pool, size)


def made(pool: Pool, size: int) -> Array:
    """New memory. On several NUMA nodes each has an equal part, which the calls' teams use."""
    if pool.nodes == 1:
        return native.aligned_bytes(size)
    part = _region(-(-size // pool.nodes))
    memory = new_block(part * pool.nodes)
    for node in range(pool.nodes):
        pool.bind(memory[part * node : part * (node + 1)], node)
    return memory


def _region(size: int) -> int:
    """At least `size` bytes, whole pages, and whole huge ones if it fills one: as the kernels cut
    scratch (kt_team_arena)."""
    pages = -(-size // native.PAGE) * native.PAGE
    return pages if pages < HUGE_PAGE else rounded(pages)


def give(pool: Pool, memory: Array) -> None:
    """The end of a call."""
    pool.workspaces.append(memory)


def free_workspaces(pool: Pool | None = None) -> None:
    """Returns to the system what no call uses at the moment, of `pool` or of the shared one."""
    (pool or Pool.shared()).workspaces.clear()
