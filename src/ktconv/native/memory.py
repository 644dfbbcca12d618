"""Pages of memory on NUMA nodes, by the system's numbers of the nodes."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import astuple, replace

from ktconv._native import ffi, lib
from ktconv.native.arrays import Array, address_of, check

PAGE = os.sysconf("SC_PAGE_SIZE")


class Ranges:
    """Memory of several arrays, which must be kept alive; neighbours count as one range."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        merged: list[list[int]] = []  # begin and end
        for begin, size in sorted({(address_of(one), one.nbytes) for one in arrays if one.nbytes}):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], begin + size)
            else:
                merged.append([begin, begin + size])
        self.spans = [(begin, end) for begin, end in merged]

    @property
    def nbytes(self) -> int:
        """Bytes of all together."""
        return sum(end - begin for begin, end in self.spans)

    def cut(self, count: int) -> list[Ranges]:
        """Splits the memory into up to `count` ranges of nearly equal size, for a thread each."""
        each = max(PAGE, -(-self.nbytes // max(1, count) // PAGE) * PAGE)
        pieces: list[list[tuple[int, int]]] = [[]]
        room = each
        for begin, end in self.spans:
            while end - begin > room:
                middle = (begin + room) // PAGE * PAGE
                if middle > begin:
                    pieces[-1].append((begin, middle))
                    begin = middle
                pieces.append([])
                room = each
            pieces[-1].append((begin, end))
            room -= end - begin
        return [_of_spans(piece) for piece in pieces if piece]


def _of_spans(spans: list[tuple[int, int]]) -> Ranges:
    found = Ranges(())
    found.spans = spans
    return found


def _pointer(ranges: Ranges) -> tuple[Any, Array]:
    """kt_range [n], and what keeps it."""
    table = np.array([(begin, end - begin) for begin, end in ranges.spans], np.uint64)
    table = np.ascontiguousarray(table.reshape(-1, 2))
    if not len(table):
        table = np.zeros((1, 2), np.uint64)
    return ffi.cast("kt_range *", ffi.from_buffer(table)), table


class Gathered(Struct, frozen=True):
    """Result of `gather_pages`, in pages; see kt_gathered."""

    pages: int = 0
    local: int = 0
    moved: int = 0
    shared: int = 0
    busy: int = 0
    full: int = 0
    error: int = 0

    def __add__(self, other: Gathered) -> Gathered:
        sums = map(operator.add, astuple(self), astuple(other))
        return replace(Gathered(*sums), error=self.error or other.error)

    @property
    def refusal(self) -> str:
        """Reason why pages were not moved, for people; empty where all lie right."""
        if self.error:
            return f"the system forbids it ({os.strerror(self.error)})"
        if self.full:
            return "the node has no memory left"
        if self.shared:
            return "other processes have mapped them too"
        return "the file system does not move its pages" if self.busy else ""


def bind_memory(memory: Array, os_node: int) -> bool:
    """Asks for the pages of `memory` to be on a NUMA node. False where the system refuses: they lie
    where the thread runs that writes to them first."""
    status = lib.kt_memory_bind(ffi.from_buffer(memory), memory.nbytes, os_node)
    if status == lib.KT_ERR_UNSUPPORTED:
        return False
    check(status)
    return True


def gather_pages(ranges: Ranges, os_node: int) -> Gathered:
    """Reads all pages from the calling thread, and moves those to the node that lie elsewhere, as
    far as the system does it."""
    pointer, _table = _pointer(ranges)
    out = ffi.new("kt_gathered *")
    check(lib.kt_memory_gather(pointer, len(ranges.spans), os_node, out))
    return Gathered(out.pages, out.local, out.moved, out.shared, out.busy, out.full, out.error)


def pages_by_node(ranges: Ranges, count: int) -> tuple[list[int], int] | None:
    """Whole pages on each of the nodes 0 .. count - 1, and those elsewhere or in no memory; None
    where the system does not say."""
    pointer, _table = _pointer(ranges)
    nodes, elsewhere = ffi.new("int64_t[]", max(1, count)), ffi.new("int64_t *")
    status = lib.kt_memory_nodes(pointer, len(ranges.spans), nodes, count, elsewhere)
    if status == lib.KT_ERR_UNSUPPORTED:
        return None
    check(status)
    return list(nodes)[:count], int(elsewhere[0])


def populate(memory: Array) -> bool:
    """Gives every page of `memory` to the process, by the calling thread; False where there is no
    room for all, or the kernel is older than 5.14."""
    return bool(lib.kt_memory_populate(ffi.from_buffer(memory), memory.nbytes) == lib.KT_OK)


def allowed_nodes(count: int) -> list[int] | None:
    """The nodes below `count` that memory of this process may come from: what cpusets and numactl
    allow. None where the system does not say."""
    out = ffi.new("uint8_t[]", max(1, count))
    if lib.kt_memory_allowed(out, count) != lib.KT_OK:
        return None
    return [node for node in range(count) if out[node]]
