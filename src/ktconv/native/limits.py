"""Limits of the machine: reading memory, multiplying."""

from __future__ import annotations

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, check
from ktconv.native.pool import Pool

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
