"""The bytes of a layer's packed tensors in memory, each part where its threads run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import ResourceError
from ktconv.formats import TensorId
from ktconv.native import Gathered, Ranges
from ktconv.runtime.memory.needs import (
    LINE,
    expect_room,
    needs_of,
    part_nodes,
    part_size,
    shortage,
    tensors_of,
)
from ktconv.source import TensorRef
from ktconv.system import blocks, machine
from ktconv.system.arrays import U8, Array
from ktconv.system.blocks import rounded
from ktconv.system.files import read_ahead
from ktconv.system.nodes import cpus_of
from ktconv.system.pool import Pool
from ktconv.system.regular_files import opened_regular
from ktconv.system.threads import run_placed
from ktconv.system.units import counted
from ktconv.targets.packed.weights import PackedWeights, map_pages

Say = Callable[[str], None]

_ENOUGH = 0.95  # of a layer's pages on their nodes: those that parts share are nobody's
_PIECES = 16  # of a part, for the threads of its node
_CHUNK, _AHEAD = 4 << 20, 16 << 20  # bytes of a file
_TOGETHER = 64  # small tensors that are asked for at once


def warn(note: str) -> None:
    """A sentence for who called the library."""
    warnings.warn(note, stacklevel=2)


class Held(Protocol):
    """Bytes of tensors."""

    kind: str
    note: str

    def get(self, tensor: TensorId) -> Array: ...

    def read(self, tensors: Sequence[TensorId]) -> Iterator[tuple[TensorId, Array]]:
        """Each of some small tensors, with its bytes as they are stored."""

    def release(self) -> None:
        """Gives memory back that can be read again when it is needed."""


class Mapped:
    """Tensors in files, each mapped once. `huge`: on huge pages, where the file system has some."""

    kind = "map"
    huge = getattr(mmap, "MADV_HUGEPAGE", 0)  # of madvise

    def __init__(self, packed: PackedWeights, huge: bool = False, note: str = "") -> None:
        self._packed, self._advised, self.note = packed, huge, note
        self._files: dict[Path, tuple[mmap.mmap, Array]] = {}

    def get(self, tensor: TensorId) -> Array:
        place = self._packed.place(tensor)
        if place.file not in self._files:
            pages = map_pages(place.file)
            if self._advised and self.huge:
                with contextlib.suppress(OSError):  # kernels without them
                    pages.madvise(self.huge)
            self._files[place.file] = pages, np.frombuffer(pages, np.uint8)
        return self._files[place.file][1][place.offset : place.offset + place.nbytes]

    def read(self, tensors: Sequence[TensorId]) -> Iterator[tuple[TensorId, Array]]:
        """See `Held`. The weights around them are not brought into memory: what a file has there on
        small pages stays so, and weights are faster on large ones."""
        for file, same in _by_file(self._packed, tensors):
            with _reading(file) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
                for number, tensor in enumerate(same):
                    if number % _TOGETHER == 0:  # the disk finds them at the same time
                        for soon in same[number : number + _TOGETHER]:
                            _read_soon(fd, self._packed.place(soon))
                    place = self._packed.place(tensor)
                    stored = np.empty(place.nbytes, np.uint8)
                    _read_tensor(fd, place, stored)
                    yield tensor, stored
                    _forget_pages(fd, place)

    def release(self) -> None:
        """Pages that were read do not count as this process's memory any more."""
        for pages, _ in self._files.values():
            pages.madvise(mmap.MADV_DONTNEED)


class Copied(Struct):
    """Tensors in memory of our own, a block for each part."""

    kind: str
    note: str
    places: dict[TensorId, tuple[int, int, int]]  # block, first byte and size
    blocks: Sequence[U8]

    def get(self, tensor: TensorId) -> Array:
        block, start, size = self.places[tensor]
        return self.blocks[block][start : start + size]

    def read(self, tensors: Sequence[TensorId]) -> Iterator[tuple[TensorId, Array]]:
        return ((tensor, self.get(tensor)) for tensor in tensors)

    def release(self) -> None:
        """Nothing: there is no other place to read it from."""


def held_weights(
    packed: PackedWeights,
    layer: int,
    experts: Collection[int],
    pool: Pool,
    memory: str,
    say: Say = warn,
) -> Held:
    """The tensors of `experts` of a layer, where `memory` (one of MEMORY) wants them.

    On a machine with one node "auto" and "map" read nothing; on one with several they read the
    layer, so that its pages come to the nodes of `pool` that compute them, and "auto" copies it
    where they cannot be moved. `say` gets a sentence where weights stay on another node. Raises
    ResourceError where memory for "copy" or "shared" is missing.
    """
    parts = tensors_of(packed, layer, experts)
    os_nodes = part_nodes(len(parts), pool)
    note = _few_parts(layer, len(parts), pool)
    if note:
        say(note)
    if memory in ("copy", "shared"):
        return _copied(packed, layer, parts, os_nodes, memory, note)
    mapped = Mapped(packed, huge=not pool.placed, note=note)
    if all(node is None for node in os_nodes):
        return mapped
    found = _gathered([[mapped.get(tensor) for tensor in part] for part in parts], os_nodes)
    if found.local >= _ENOUGH * found.pages or not found.refusal:
        return mapped
    needs = needs_of([rounded(part_size(packed, part)) for part in parts], os_nodes)
    far, whole = f"{found.pages - found.local:,}", counted(found.pages, "page")
    what = (
        f"{far} of {whole} of layer {layer} of {packed.directory} lie on another NUMA node than "
        f"the one that computes them, and cannot be moved, as {found.refusal}"
    )
    if memory == "map" or (missing := shortage(needs)):
        more = "" if memory == "map" else f"; a copy takes {missing}"
        mapped.note = f"{what}: speed suffers{more}"
        say(mapped.note)
        return mapped
    mapped.release()
    copied = _copied(packed, layer, parts, os_nodes, "copy", f"{what}: they were copied")
    say(copied.note)
    return copied


def _few_parts(layer: int, parts: int, pool: Pool) -> str:
    if not pool.placed or parts >= pool.nodes:
        return ""
    return (
        f"layer {layer} is cut into {counted(parts, 'part')}, but threads of {pool.nodes} NUMA "
        "nodes compute it: some read weights of another node (ktconv reshard "
        f"--numa {pool.nodes} changes that)"
    )


# ---- pages of files ------------------------------------------------------------------------


def _gathered(parts: Sequence[Sequence[Array]], os_nodes: Sequence[int | None]) -> Gathered:
    """Reads the pages of each part by threads of its node, which moves those that lie elsewhere."""
    found: list[Gathered] = []
    cpus = machine.topology()

    def gather(ranges: Ranges, node: int) -> None:
        found.append(native.gather_pages(ranges, node))

    def tasks(node: int) -> list[Callable[[], None]]:
        own = [part for part, of in zip(parts, os_nodes, strict=True) if of == node]
        cut = [one for part in own for one in Ranges(part).cut(_PIECES)]
        return [partial(gather, one, node) for one in cut]

    wanted = sorted({node for node in os_nodes if node is not None})
    run_placed([(cpus_of(node, cpus), tasks(node)) for node in wanted])
    return sum(found, Gathered())


# ---- copies --------------------------------------------------------------------------------


def _copied(
    packed: PackedWeights,
    layer: int,
    parts: Sequence[Sequence[TensorId]],
    os_nodes: Sequence[int | None],
    kind: str,
    note: str,
) -> Copied:
    places: dict[TensorId, tuple[int, int, int]] = {}
    sizes = []
    for number, part in enumerate(parts):
        start = 0
        for tensor in part:
            size = packed.place(tensor).nbytes
            places[tensor] = number, start, size
            start += -(-size // LINE) * LINE
        sizes.append(start)
    needs = needs_of(map(rounded, sizes), os_nodes)
    what = f"layer {layer} of {packed.directory}"

    def fill(memory: Sequence[U8]) -> None:
        _fill(packed, parts, os_nodes, Copied(kind, note, places, memory))

    if kind == "shared":

        def fill_if_there_is_room(memory: Sequence[U8]) -> None:
            expect_room(needs, what)
            fill(memory)

        key = _key(packed, layer, parts, os_nodes)
        cut = [rounded(size) for size in sizes]
        whole = blocks.shared_block(key, cut, os_nodes, fill_if_there_is_room)
        ends = np.cumsum(cut)
        pieces = [whole[end - size : end] for end, size in zip(ends, cut, strict=True)]
        # The memory may be there already, but each process has page tables of its own.
        _gathered([[piece] for piece in pieces], os_nodes)
        return Copied(kind, note, places, pieces)
    expect_room(needs, what)
    made: dict[int, U8] = {}

    def make(number: int) -> None:
        made[number] = blocks.private_block(sizes[number], os_nodes[number])

    run_placed(_by_node(os_nodes, lambda number: [partial(make, number)]))
    pieces = [made[number] for number in range(len(sizes))]
    fill(pieces)
    for piece in pieces:
        piece.flags.writeable = False
    return Copied(kind, note, places, pieces)


def _by_node(
    os_nodes: Sequence[int | None], tasks: Callable[[int], list[Callable[[], None]]]
) -> list[tuple[Collection[int], list[Callable[[], None]]]]:
    """Tasks of each part, by the CPUs of its node."""
    cpus = machine.topology()
    return [
        (
            () if node is None else cpus_of(node, cpus),
            [one for number, of in enumerate(os_nodes) if of == node for one in tasks(number)],
        )
        for node in dict.fromkeys(os_nodes)
    ]


def _fill(
    packed: PackedWeights,
    parts: Sequence[Sequence[TensorId]],
    os_nodes: Sequence[int | None],
    held: Copied,
) -> None:
    """Reads the tensors of each part by threads of its node: pages come from there even where the
    system refuses to bind them."""

    def tasks(number: int) -> list[Callable[[], None]]:
        step = -(-len(parts[number]) // _PIECES) or 1
        cut = [parts[number][at : at + step] for at in range(0, len(parts[number]), step)]
        return [partial(_read_tensors, packed, one, held) for one in cut]

    run_placed(_by_node(os_nodes, tasks))
    _forget(packed, [tensor for part in parts for tensor in part])


def _forget(packed: PackedWeights, tensors: Sequence[TensorId]) -> None:
    """Lets the system forget the pages of tensors that were read: all at once, as each call waits
    for all CPUs where a page is being used, and parts lie between one another."""
    ends: dict[Path, tuple[int, int]] = {}
    for place in map(packed.place, tensors):
        begin, end = ends.get(place.file, (place.offset, 0))
        ends[place.file] = min(begin, place.offset), max(end, place.offset + place.nbytes)
    for file, (begin, end) in ends.items():
        with contextlib.suppress(OSError), opened_regular(file) as fd:
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _read_tensors(packed: PackedWeights, tensors: Sequence[TensorId], held: Copied) -> None:
    """Into their places, file by file."""
    for file, same in _by_file(packed, tensors):
        with _reading(file) as fd:
            for number, tensor in enumerate(same):
                asked = 0
                for soon in same[number + 1 : number + 5]:  # between them lie other parts' tensors
                    if asked < _AHEAD:
                        _read_soon(fd, packed.place(soon))
                    asked += packed.place(soon).nbytes
                _read_tensor(fd, packed.place(tensor), held.get(tensor))


def _by_file(
    packed: PackedWeights, tensors: Iterable[TensorId]
) -> Iterator[tuple[Path, list[TensorId]]]:
    """Tensors of each file, in their order."""
    for file, same in groupby(tensors, lambda one: packed.place(one).file):
        yield file, list(same)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[int]:
    """A descriptor. ResourceError where the file cannot be read."""
    try:
        with opened_regular(file) as fd:
            yield fd
    except OSError as error:
        raise ResourceError(f"{file} cannot be read: {error.strerror}") from error


def _read_soon(fd: int, place: TensorRef) -> None:
    read_ahead(fd, place.offset, place.nbytes)


def _forget_pages(fd: int, place: TensorRef) -> None:
    """Lets the system forget the pages that a tensor lies in."""
    first = place.offset // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(place.offset + place.nbytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    os.posix_fadvise(fd, first, size, os.POSIX_FADV_DONTNEED)


def _read_tensor(fd: int, place: TensorRef, to: Array) -> None:
    done = 0
    while done < place.nbytes:
        piece: Any = to[done : done + _CHUNK]
        count = os.preadv(fd, [piece], place.offset + done)
        if not count:
            raise ResourceError(f"{place.file} was shortened while it was read", "convert it again")
        done += count


def _key(
    packed: PackedWeights,
    layer: int,
    parts: Sequence[Sequence[TensorId]],
    os_nodes: Sequence[int | None],
) -> str:
    """Name of a shared copy, equal for processes that want the same bytes at the same places."""
    files = sorted({packed.place(tensor).file for part in parts for tensor in part})
    status = [file.stat() for file in files]
    same = [
        1,  # changes with the order of bytes in a block
        [[one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns] for one in status],
        layer,
        sorted({tensor.expert for part in parts for tensor in part}),
        list(os_nodes),
    ]
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:32]
