"""Threads of the C library."""

from __future__ import annotations

from typing import Any

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check


class Pool:
    """Threads of the C library. `cpus` and `nodes` have one number per thread, as kt_pool_create's;
    ValueError if they do not."""

    def __init__(
        self, threads: int, cpus: list[int] | None = None, nodes: list[int] | None = None
    ) -> None:
        for what, places in (("cpus", cpus), ("nodes", nodes)):
            if places is not None and len(places) != threads:
                raise ValueError(f"{what} are {len(places)} numbers for {threads} threads")
        place = ffi.NULL if cpus is None else ffi.new("int32_t[]", cpus)
        node = ffi.NULL if nodes is None else ffi.new("int32_t[]", nodes)
        out = ffi.new("kt_pool **")
        check(lib.kt_pool_create(threads, place, node, out))
        self.c = ffi.gc(out[0], lib.kt_pool_destroy)
        self.threads = threads

    def close(self) -> None:
        """Ends the threads; the pool cannot be used afterwards. Calls of other threads that are
        under way keep it until they are done."""
        self.c = ffi.NULL

    def empty(self, times: int) -> None:
        """Runs a job that does nothing, `times` times."""
        check(lib.kt_pool_empty(self.c, times))


def open_pool(pool: Pool) -> Any:
    """The pool's pointer; ValueError once it is closed."""
    found = pool.c  # once: another thread may close it meanwhile
    if not found:
        raise ValueError("the pool is closed")
    return found


UNITS = {"int8": lib.KT_UNIT_INT8, "bf16": lib.KT_UNIT_BF16}


def limit_read(pool: Pool, memory: Array, streams: int) -> None:
    """Reads all of `memory` once, in `streams` streams per thread, to be timed."""
    check(lib.kt_limit_read(pool.c, ffi.from_buffer(memory), memory.nbytes, streams))


def limit_dot(pool: Pool, unit: str, rounds: int) -> None:
    """Each thread does rounds * limit_ops() operations of a unit, to be timed."""
    check(lib.kt_limit_dot(pool.c, UNITS[unit], rounds))


def limit_ops() -> int:
    """Operations of a round of limit_dot."""
    return int(lib.kt_limit_ops())
