"""A cache of the bytes of remote sources, kept in a directory for other runs (`--cache-dir`).

Each file of a source has a sparse file of data, and a log with a line for each range that is there:
its start, its end and the CRC-32 of its bytes. A line is written after its data, in one call, so
that runs can share a directory and be killed at any time; a range that a power cut left incomplete
differs from its CRC and is read again. Names are those of content: another ETag is another file.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from pathlib import Path

from msgspec import Struct, field

from ktconv.errors import UsageError
from ktconv.source.remote.ahead import Fetch
from ktconv.source.remote.store import RemoteFile
from ktconv.source.remote.urls import Url
from ktconv.system.files import opened_fd, read_exactly, translated, write_all

_FLAGS = os.O_WRONLY | os.O_CREAT


class _Kept(Struct):
    """One file of the source: its files here, and the ranges [start, stop) that are there."""

    data: Path
    log: Path
    ranges: list[tuple[int, int, int]] = field(default_factory=list)  # with their CRCs
    checked: set[tuple[int, int]] = field(default_factory=set)


class ByteCache:
    """Bytes of the files at `url`, kept in `directory`. UsageError where that is no directory."""

    def __init__(self, url: Url, directory: Path) -> None:
        self._url, self._directory = url, directory
        self._kept: dict[RemoteFile, _Kept] = {}
        self._lock = threading.Lock()
        if directory.exists() and not directory.is_dir():
            raise UsageError(f"--cache-dir {directory} is no directory", "name another one")
        with translated("write", directory):
            directory.mkdir(parents=True, exist_ok=True)

    def read(self, file: RemoteFile, start: int, stop: int, fetch: Fetch) -> bytes | bytearray:
        """Bytes from `start` to before `stop`; what is not here is fetched, and kept."""
        kept = self._of(file)
        if kept is None or start == stop:
            return fetch(file.name, start, stop)
        for first, last in self._gaps(kept, start, stop):
            found = fetch(file.name, first, last)
            self._keep(kept, first, found)
            if (first, last) == (start, stop):
                return found
        data = bytearray(stop - start)
        with translated("read", self._directory), opened_fd(kept.data, os.O_RDONLY) as fd:
            read_exactly(fd, memoryview(data), start)
        return data

    def _keep(self, kept: _Kept, start: int, data: bytes | bytearray) -> None:
        found = start, start + len(data), zlib.crc32(data)
        with translated("write", self._directory):
            with opened_fd(kept.data, _FLAGS) as fd:
                write_all(fd, memoryview(data), start)
            with opened_fd(kept.log, _FLAGS | os.O_APPEND) as fd:
                os.write(fd, f"{found[0]} {found[1]} {found[2]:08x}\n".encode())
        with self._lock:
            kept.ranges.append(found)
            kept.checked.add(found[:2])

    def kept(self, file: RemoteFile, start: int, stop: int) -> int:
        """Number of bytes of [start, stop) that are here, as far as is known without reading
        them."""
        if (kept := self._of(file)) is None:
            return 0
        gaps = self._gaps(kept, start, stop, trusted=True)
        return stop - start - sum(last - first for first, last in gaps)

    def _gaps(
        self, kept: _Kept, start: int, stop: int, *, trusted: bool = False
    ) -> list[tuple[int, int]]:
        """Ranges of [start, stop) that are not there; unless `trusted`, what is there is
        checked."""
        gaps, at = [], start
        with self._lock:
            there = sorted(one for one in kept.ranges if one[0] < stop and one[1] > start)
        for first, last, crc in there:
            if last <= at or not (trusted or self._intact(kept, first, last, crc)):
                continue
            if first > at:
                gaps.append((at, first))
            at = max(at, last)
        return [*gaps, (at, stop)] if at < stop else gaps

    def _intact(self, kept: _Kept, start: int, stop: int, crc: int) -> bool:
        """Whether a range is what its line says; asked once in a process."""
        if (start, stop) in kept.checked:
            return True
        data = bytearray(stop - start)
        try:
            with opened_fd(kept.data, os.O_RDONLY) as fd:
                read_exactly(fd, memoryview(data), start)
        except OSError:
            return False
        if zlib.crc32(data) != crc:
            return False
        with self._lock:
            kept.checked.add((start, stop))
        return True

    def _of(self, file: RemoteFile) -> _Kept | None:
        """Cached ranges of a file; None where its server says nothing that identifies it."""
        if not file.etag:
            return None
        with self._lock:
            if file not in self._kept:
                self._kept[file] = self._opened(file)
            return self._kept[file]

    def _opened(self, file: RemoteFile) -> _Kept:
        identity = "\0".join((self._url.scheme, self._url.place, file.name, file.etag))
        key = hashlib.sha256(f"{identity}\0{file.nbytes}".encode()).hexdigest()[:32]
        folder = self._directory / key[:2]
        with translated("write", folder):
            folder.mkdir(exist_ok=True)
            log = folder / f"{key}.log"
            text = log.read_bytes() if log.exists() else b""
        return _Kept(folder / f"{key}.data", log, _ranges(text, file.nbytes))


def _ranges(text: bytes, nbytes: int) -> list[tuple[int, int, int]]:
    """The lines of a log that are whole and can be."""
    found = []
    for line in text.split(b"\n")[:-1]:
        try:
            start, stop, crc = line.split(b" ")
            one = int(start), int(stop), int(crc, 16)
        except ValueError:
            continue
        if 0 <= one[0] < one[1] <= nbytes:
            found.append(one)
    return found


def kept_bytes(directory: Path) -> int:
    """Size of a cache on its disk, in bytes."""
    with translated("read", directory):
        return sum(path.stat().st_blocks * 512 for path in directory.glob("*/*.data"))
