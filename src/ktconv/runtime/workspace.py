"""Memory that calls need while they run.

It belongs to a pool, as its threads' stacks do: calls on a pool come one after the other, so a
model of sixty layers needs one workspace and not sixty. Calls that wait for the pool have one each.
No result, argument or state lies in it between calls.
"""

from __future__ import annotations

from ktconv import native
from ktconv.system.arrays import Array
from ktconv.system.pool import Pool


def take(pool: Pool, size: int = 64) -> Array:
    """Memory for one call, aligned to 64: what is free, if that is at least `size` bytes."""
    try:
        memory = pool.workspaces.pop()  # pop and append are atomic
    except IndexError:
        return native.aligned_bytes(size)
    return memory if memory.nbytes >= size else native.aligned_bytes(size)


def give(pool: Pool, memory: Array) -> None:
    """The end of a call."""
    pool.workspaces.append(memory)


def free_workspaces(pool: Pool | None = None) -> None:
    """Returns to the system what no call uses at the moment, of `pool` or of the shared one."""
    (pool or Pool.shared()).workspaces.clear()
