"""The state of a conversion in OUTPUT/.ktconv: what was asked for and which units are done.

    run.json            options, source identity and version of the whole conversion
    layer-00003.json    one record per finished unit, written after the unit is final
    lock                byte-range locks: one byte per layer, so that machines can share
    *.part              staged files of units under way

The directory is removed when the conversion is complete and the manifest is written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ktconv.errors import OutputError
from ktconv.writer.files import io_error, make_directory, translated, write_durably

STATE_DIRECTORY = ".ktconv"
OTHERS_BYTE = 1 << 30  # locks of shared non-expert tensors; layers use their index
FINISH_BYTE = OTHERS_BYTE + 1  # lock of whoever writes index and manifest

Record = dict[str, Any]


class Journal:
    """Reads and writes the records of one output directory."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.directory = output / STATE_DIRECTORY

    def create(self) -> None:
        make_directory(self.output)
        make_directory(self.directory)

    def read_run(self) -> Record | None:
        return self._read("run.json")

    def write_run(self, record: Record) -> None:
        write_durably(self.directory / "run.json", encode(record), self.directory)

    def read_unit(self, key: str) -> Record | None:
        """The record of a finished unit, or None. A damaged record counts as none."""
        return self._read(f"{key}.json")

    def write_unit(self, key: str, record: Record) -> None:
        write_durably(self.directory / f"{key}.json", encode(record), self.directory)

    def _read(self, name: str) -> Record | None:
        path = self.directory / name
        try:
            record = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_error("read", path, error) from error
        except ValueError:
            return None
        return record if isinstance(record, dict) else None

    def unit_is_intact(self, record: Record) -> bool:
        """Whether the files of a finished unit are there with their size and header."""
        return all(file_is_intact(self.output, file) for file in record["files"])


def encode(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def file_is_intact(output: Path, record: Mapping[str, Any]) -> bool:
    """Whether a file has the recorded size and, for shards, header."""
    path = output / str(record["name"])
    try:
        if path.stat().st_size != record["bytes"]:
            return False
        if "header_sha256" not in record:
            return True
        with path.open("rb") as file:
            start = file.read(8)
            header = start + file.read(int.from_bytes(start, "little"))
    except OSError:
        return False
    return hashlib.sha256(header).hexdigest() == str(record["header_sha256"])


def differences(ours: Record, theirs: Record, path: str = "") -> list[str]:
    """Where two records differ, as "options.numa: 2 there, 1 now"."""
    found = []
    for key in sorted(ours.keys() | theirs.keys()):
        now, there = ours.get(key), theirs.get(key)
        name = f"{path}{key}"
        if isinstance(now, dict) and isinstance(there, dict):
            found += differences(now, there, f"{name}.")
        elif now != there:
            found.append(f"{name}: {_short(there)} there, {_short(now)} now")
    return found


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class OutputLock:
    """Locks on bytes of OUTPUT/.ktconv/lock, held until `release` or the end of the process.

    POSIX record locks, because they work between machines on network file systems. They
    belong to a process and vanish when it closes any descriptor of the file, so each file
    is opened once per process and the class remembers what the process holds.
    """

    _guard = threading.Lock()
    _files: ClassVar[dict[Path, tuple[int, set[int]]]] = {}  # path -> descriptor, held bytes

    def __init__(self, journal: Journal) -> None:
        self._path = (journal.directory / "lock").resolve()
        self._mine: set[int] = set()

    def acquire(self, units: Iterable[int], what: str) -> None:
        """Lock these bytes, all or none. OutputError if another run has one of them."""
        if not self._try(set(units)):
            raise OutputError(
                f"another ktconv is converting {what} into {self._path.parent.parent}",
                "wait for it to end, or give each run its own --layers",
            )

    def try_acquire(self, unit: int) -> bool:
        return self._try({unit})

    def release(self) -> None:
        """Give back what this object holds."""
        with self._guard:
            if self._path not in self._files:
                return
            fd, held = self._files[self._path]
            for unit in self._mine:
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, unit)
            held -= self._mine
            self._mine.clear()
            self._forget_if_unused()

    def _try(self, wanted: set[int]) -> bool:
        with self._guard, translated("lock", self._path):
            while True:
                fd, held = self._open()
                if wanted & held or not _lock_bytes(fd, wanted):
                    self._forget_if_unused()
                    return False
                if held or _is_open_file(fd, self._path):
                    break
                self._forget_if_unused()  # removed by a run that finished meanwhile
            held |= wanted
            self._mine |= wanted
            return True

    def _open(self) -> tuple[int, set[int]]:
        if self._path not in self._files:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._files[self._path] = fd, set()
        return self._files[self._path]

    def _forget_if_unused(self) -> None:
        fd, held = self._files[self._path]
        if not held:
            os.close(fd)
            del self._files[self._path]


def _is_open_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock_bytes(fd: int, wanted: set[int]) -> bool:
    """Lock all of these bytes or none, without waiting."""
    taken: list[int] = []
    for unit in sorted(wanted):
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, unit)
        except OSError as error:
            for other in taken:
                fcntl.lockf(fd, fcntl.LOCK_UN, 1, other)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        taken.append(unit)
    return True
