"""Large blocks of memory on huge pages, of this process or shared by several.

A block of several processes is memory without a name (memfd): it is gone with the last process that
has it, however that ends. A small file in /dev/shm says which processes have it, and is locked
while one of them fills it; the others open it through /proc.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from ktconv import native
from ktconv.errors import ResourceError
from ktconv.system.arrays import U8
from ktconv.system.machine import text_of
from ktconv.system.nodes import HUGE_PAGE, count_in, nodes

RESERVED = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
REGISTRY = Path("/dev/shm")
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_POPULATE_READ = 22  # of madvise, since Linux 5.14
_MAP_HUGETLB, _MFD_HUGETLB, _MFD_HUGE_2MB = 0x40000, 0x4, 21 << 26


def rounded(size: int) -> int:
    """`size` in whole huge pages."""
    return -(-size // HUGE_PAGE) * HUGE_PAGE


def private_block(size: int, os_node: int | None) -> U8:
    """Zeroed memory on huge pages where the system has some: reserved ones if enough are free on
    the node, else transparent ones. To be called by a thread of the node, on which pages should be;
    None: any. Raises ResourceError where there is no address space."""
    if reserved_free(os_node) >= rounded(size):
        with contextlib.suppress(OSError):
            block = _anonymous(rounded(size), _MAP_HUGETLB)
            if _bound(block, os_node) and native.populate(block):
                return block[:size]
    block = new_block(rounded(size))
    _bound(block, os_node)
    return block[:size]


def new_block(size: int) -> U8:
    """Zeroed memory that nobody has written to: its pages come from the node where the thread runs
    that does it first, on transparent huge pages where it has room for some. What malloc gives may
    have been used before, and lie anywhere. Raises ResourceError where there is no address space.
    """
    try:
        if size < HUGE_PAGE:
            return np.frombuffer(mmap.mmap(-1, max(1, size), flags=_PRIVATE), np.uint8)[:size]
        block = _anonymous(size + HUGE_PAGE)
    except OSError as error:
        raise ResourceError(
            f"{size:,} bytes of memory cannot be had: {error.strerror}",
            "free memory, raise the limit of the process (ulimit -v), or use fewer threads",
        ) from None
    start = -native.address_of(block) % HUGE_PAGE
    return block[start : start + size]


def _anonymous(size: int, flags: int = 0) -> U8:
    pages = mmap.mmap(-1, size, flags=_PRIVATE | flags)
    _advise(pages)
    return np.frombuffer(pages, np.uint8)


def _advise(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError, AttributeError):  # kernels without them, other systems
        pages.madvise(mmap.MADV_HUGEPAGE)


def _bound(block: U8, os_node: int | None) -> bool:
    """True: how it is placed is a wish."""
    if os_node is not None:
        native.bind_memory(block, os_node)
    return True


def reserved_free(os_node: int | None) -> int:
    """Bytes of reserved huge pages that nobody has, on a node or on all."""
    whole = count_in(RESERVED / "free_hugepages") - count_in(RESERVED / "resv_hugepages")
    if os_node is None or whole <= 0:
        return HUGE_PAGE * max(0, whole)
    own = next((one.huge_free for one in nodes() if one.number == os_node), 0)
    return min(HUGE_PAGE * whole, own)


_TRANSPARENT = ("AnonHugePages", "FilePmdMapped", "ShmemPmdMapped")
_RESERVED = ("Private_Hugetlb", "Shared_Hugetlb")


class HugeBytes(Struct, frozen=True):
    """Bytes on huge pages."""

    transparent: int
    reserved: int

    @property
    def all(self) -> int:
        return self.transparent + self.reserved


def huge_bytes(ranges: native.Ranges) -> HugeBytes:
    """Bytes of these ranges on huge pages, as /proc/self/smaps says it of the mappings that they
    are in; at most, where a mapping has other memory too."""
    found, left = {_TRANSPARENT: 0, _RESERVED: 0}, 0
    for line in text_of(Path("/proc/self/smaps")).splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(word, 16) for word in match.groups())
            spans = ranges.spans
            left = sum(max(0, min(end, b) - max(first, a)) for a, b in spans if a < end)
        elif left and (match := re.match(r"(\w+):\s+(\d+) kB", line)):
            for kinds in found:
                if match[1] in kinds:
                    own = min(left, 1024 * int(match[2]))
                    found[kinds] += own
                    left -= own
    return HugeBytes(found[_TRANSPARENT], found[_RESERVED])


# ---- shared by processes -------------------------------------------------------------------

Fill = Callable[[Sequence[U8]], None]


def shared_block(key: str, sizes: Sequence[int], os_nodes: Sequence[int | None], fill: Fill) -> U8:
    """Read-only memory that all processes of this user with the same `key` share.

    It has a piece for each of `sizes` (multiples of a huge page), one behind the other, each bound
    to its node. The first process calls `fill` with the pieces; others wait meanwhile. Raises what
    `fill` raises, and ResourceError where the system has no such memory.
    """
    path = _folder() / f"ktconv-{os.geteuid()}-{key}"
    _sweep(path)
    with _locked(path) as lock:
        users = _users(lock)
        fd = next((found for user in users if (found := _opened(user)) is not None), None)
        if fd is None:
            users = []
            try:
                fd = _filled(sizes, os_nodes, fill)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        try:
            pages = mmap.mmap(fd, sum(sizes), mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            os.close(fd)
            raise _no_memory(error) from None
        _advise(pages)
        with contextlib.suppress(OSError):  # the memory is there; page tables are the process's own
            pages.madvise(_POPULATE_READ)
        status = os.fstat(fd)
        own = [os.getpid(), fd, status.st_dev, status.st_ino, status.st_size]
        _write(lock, [*(user for user in users if _is_there(user)), own])
    weakref.finalize(pages, _leave, path, own)
    return np.frombuffer(pages, np.uint8)


def _folder() -> Path:
    return REGISTRY if os.access(REGISTRY, os.W_OK) else Path(tempfile.gettempdir())


def _no_memory(error: OSError) -> ResourceError:
    return ResourceError(
        f"memory for several processes cannot be had: {error.strerror}",
        'give memory="copy", which each process has for itself',
    )


def _filled(sizes: Sequence[int], os_nodes: Sequence[int | None], fill: Fill) -> int:
    """A descriptor of new memory with its contents, which nobody can change any more."""
    enough = all(
        reserved_free(node) >= sum(s for s, n in zip(sizes, os_nodes, strict=True) if n == node)
        for node in set(os_nodes)
    )
    for flags in (_MFD_HUGETLB | _MFD_HUGE_2MB, 0) if enough else (0,):
        fd = None
        try:
            fd = os.memfd_create("ktconv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
            os.ftruncate(fd, sum(sizes))
            if _fill_mapping(fd, sizes, os_nodes, fill, reserved=bool(flags)):
                _seal(fd)
                return fd
            os.close(fd)
        except BaseException as error:
            if fd is not None:
                os.close(fd)
            if isinstance(error, OSError) and not flags:
                raise _no_memory(error) from None
            if not isinstance(error, OSError):
                raise
    raise ResourceError("memory for several processes cannot be had")


def _fill_mapping(
    fd: int, sizes: Sequence[int], os_nodes: Sequence[int | None], fill: Fill, reserved: bool
) -> bool:
    """False where reserved pages turn out not to be for this process. No mapping is left."""
    pages = mmap.mmap(fd, sum(sizes))
    _advise(pages)
    whole, ends = np.frombuffer(pages, np.uint8), np.cumsum(sizes)
    pieces = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    for piece, node in zip(pieces, os_nodes, strict=True):
        _bound(piece, node)
    if reserved and not all(native.populate(piece) for piece in pieces):
        return False
    fill(pieces)
    return True


def _seal(fd: int) -> None:
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    with contextlib.suppress(OSError):  # a wish: whoever maps it does so read-only
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


@contextlib.contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[int]:
    """A descriptor of the file, locked. BlockingIOError where another has locked it, unless
    `wait`."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ResourceError(
                f"{path} cannot be opened: {error.strerror}",
                'allow writing there, or give memory="copy", which each process has for itself',
            ) from None
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
                raise ResourceError(f"{path} belongs to another user", "remove it")
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == status.st_ino:
                    yield fd
                    return
        finally:
            os.close(fd)


def _users(fd: int) -> list[Any]:
    try:
        found = json.loads(os.pread(fd, 1 << 20, 0))
    except ValueError:
        return []  # new, or left by a process that was killed while it wrote
    good = isinstance(found, list) and all(
        isinstance(user, list) and len(user) == 5 and all(type(n) is int for n in user)
        for user in found
    )
    return found if good else []


def _write(fd: int, users: list[Any]) -> None:
    text = json.dumps(users).encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def _opened(user: Sequence[int]) -> int | None:
    """The memory of a process that is still there and has it."""
    pid, number, *same = user
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if [status.st_dev, status.st_ino, status.st_size] == same:
        return fd
    os.close(fd)
    return None


def _is_there(user: Sequence[int]) -> bool:
    fd = _opened(user)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _leave(path: Path, own: list[int]) -> None:
    """The end of a mapping. In a child process nothing: the file names its parent."""
    if own[0] != os.getpid():
        return
    with contextlib.suppress(OSError):
        os.close(own[1])
    _remove(path)


def _sweep(path: Path) -> None:
    """Removes files of processes that were killed."""
    for other in path.parent.glob(f"ktconv-{os.geteuid()}-*"):
        if other != path:
            _remove(other)


def _remove(path: Path) -> None:
    """Removes a file unless a process has its memory, or is filling it."""
    with contextlib.suppress(OSError, ResourceError):
        if path.exists():
            with _locked(path, wait=False) as lock:
                users = [user for user in _users(lock) if _is_there(user)]
                if users:
                    _write(lock, users)
                else:
                    path.unlink()
