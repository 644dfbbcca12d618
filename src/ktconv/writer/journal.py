"""The state of a conversion in OUTPUT/.ktconv: its settings and which units are done.

    run.json            options, source identity and version of the whole conversion
    layer-00003.json    one record per finished unit, written after the unit is final, with a
                        checksum of itself and run.json
    lock                byte-range locks: one byte per layer, so that machines can share
    *.part              staged files of units under way

The directory is removed when the conversion is complete and the manifest is written, or
when a run fails that finished nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from ktconv.errors import InUseError, OutputError
from ktconv.system import checksums
from ktconv.system.files import io_error, is_there, make_directory, sync_names, write_durably
from ktconv.system.regular_files import MissingFileError, read_small
from ktconv.system.text import Notify, silent

STATE_DIRECTORY = ".ktconv"
OTHERS_BYTE = 1 << 30  # lock of the non-expert tensors; layers use their index
SETUP_BYTE = OTHERS_BYTE + 1  # lock of a run that begins or finishes, see OutputLock.setup_lock
SETUP_POLL_SECONDS = 0.02
SETUP_LOCK_TIMEOUT = 120.0  # what is done under it takes seconds even on slow disks
SETUP_NOTICE_SECONDS = 2.0  # after this time the user learns what the run waits for
ENDING_SECONDS = 1.0  # what a process that was killed may take until its locks are free
_FLOCK = "hhqqi"  # struct flock of 64-bit Linux: type, whence, start, length, process

Record = dict[str, Any]
_SEALED = re.compile(rb'\{\n "seal": "([0-9a-f]{64})",')  # how a unit's record begins on the disk
_LAYER = re.compile("[0-9]{1,9}")
_ESCAPES = re.compile(rb"\\u[dD][89a-fA-F]")  # surrogates: pairs are sound, single ones are not
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")  # no escaped backslash before u0000


class Journal:
    """Reads and writes the records of one output directory."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.directory = output / STATE_DIRECTORY
        self._begun: bytes | None = None  # run.json, once it is known here

    def create(self) -> None:
        make_directory(self.output)
        make_directory(self.directory)

    @property
    def run_file(self) -> Path:
        return self.directory / "run.json"

    def has_run(self) -> bool:
        """Whether run.json is there: a conversion that is not finished. ResourceError for a
        directory in which this user may not look."""
        return is_there(self.run_file)

    def read_run(self) -> Record | None:
        """The record in run.json. OutputError if it is damaged: units cannot be interpreted
        then."""
        record = self.peek_run()
        if is_run_record(record):
            return record
        if record is None and not self.has_run():
            return None
        raise OutputError(f"{self.run_file} is damaged", "start again with --overwrite")

    def peek_run(self) -> Record | None:
        """The record in run.json, or None if it is missing or damaged."""
        return self._read(self.run_file.name)

    def begin(self, record: Record) -> None:
        """Units that are written from here on are of the run of this record, for `write_run`."""
        self._begun = encode(record)

    def write_run(self, record: Record) -> None:
        """Write the record of a run, from which on the directories count as durable."""
        self._begun = encode(record)
        sync_names(self.directory)
        write_durably(self.run_file, self._begun, self.directory)

    def read_unit(self, key: str) -> Record | None:
        """The record of a finished unit, or None. One that is damaged, of another unit or of
        another run than that of run.json counts as none: its checksums would be wrong."""
        data = self._bytes(f"{key}.json")
        if (sealed := _SEALED.match(data)) is None:
            return None
        # Its bytes, not its values: a program that computes in a rounding mode of its own reads
        # other floats than it wrote.
        content = b"{" + data[sealed.end() :]
        if sealed[1].decode() != _seal(self._bytes(self.run_file.name), key, content):
            return None
        record = parse_record(content)
        return record if is_unit_record(record) else None

    def write_unit(self, key: str, record: Record) -> None:
        run = self._bytes(self.run_file.name) if self._begun is None else self._begun
        content = encode(record)
        sealed = b'{\n "seal": "%b",%b' % (_seal(run, key, content).encode(), content[1:])
        write_durably(self.directory / f"{key}.json", sealed, self.directory)

    def _bytes(self, name: str) -> bytes:
        """The content of a file; empty without one."""
        try:
            return read_small(self.directory, name)
        except MissingFileError:
            return b""

    def unit_keys(self) -> list[str]:
        """Keys of all units that have a record, whatever run wrote it."""
        return sorted(path.stem for path in self.directory.glob("*-*.json"))

    def _read(self, name: str) -> Record | None:
        try:
            return parse_record(read_small(self.directory, name))
        except MissingFileError:
            return None

    def unit_is_intact(self, record: Record) -> bool:
        """Whether the files of a finished unit are there with their size and header."""
        return all(file_is_intact(self.output, file) for file in record["files"])


def _seal(run: bytes, key: str, content: bytes) -> str:
    """A checksum of run.json and of a unit's key and record."""
    digest = hashlib.sha256(run)
    digest.update(b"\0%b\0%b" % (key.encode(), content))
    return digest.hexdigest()


def parse_record(data: bytes) -> Record | None:
    """A JSON object of ours as it is read back from the disk; None for anything else.

    Strings can be file names: lone surrogates and NUL, which no file name contains, are in no
    record that ktconv wrote.
    """
    try:
        record = json.loads(data.decode())
        if _ESCAPES.search(data):
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    named = b"\\u0000" in data and _NUL.search(data)  # the pattern alone takes long
    return None if named or not isinstance(record, dict) else record


def is_run_record(record: object) -> TypeGuard[Record]:
    """Whether this has the form of run.json; a manifest has it too."""
    if not isinstance(record, dict) or not isinstance(record.get("options"), dict):
        return False
    geometry = record.get("geometry")
    layers = geometry.get("layers") if isinstance(geometry, dict) else None
    return isinstance(layers, dict) and all(
        _LAYER.fullmatch(index) and isinstance(entry, dict) for index, entry in layers.items()
    )


def is_unit_record(record: object) -> TypeGuard[Record]:
    """Whether this has the form of a unit's record."""
    if not isinstance(record, dict):
        return False
    files, tensors = record.get("files"), record.get("tensors")
    return (
        isinstance(files, list)
        and all(map(_is_file_record, files))
        and isinstance(tensors, dict)
        and all(map(_is_tensor_record, tensors.values()))
        and type(record.get("zero_scales", 0)) is int
    )


def _is_file_record(file: object) -> bool:
    if not isinstance(file, dict):
        return False
    name, header = file.get("name"), file.get("header_sha256", "")
    return (
        isinstance(name, str)
        and type(file.get("bytes")) is int
        and type(length := file.get("header_bytes", 8)) is int
        and length >= 8
        and isinstance(header, str)
        and not name.startswith("/")
        and ".." not in name.split("/")
    )


def _is_tensor_record(record: object) -> bool:
    if not isinstance(record, dict):
        return False
    figures = [record.get(key, 0.0) for key in ("relative_rms_error", "zero_share")]
    return checksums.is_sound(record) and all(
        isinstance(one, float) and math.isfinite(one) for one in figures
    )


def encode(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def file_is_intact(output: Path, record: Mapping[str, Any]) -> bool:
    """Whether a file has the recorded size and, for shards, header."""
    path = output / str(record["name"])
    try:
        size = path.stat().st_size
        if size != record.get("bytes"):
            return False
        if "header_sha256" not in record:
            return True
        with path.open("rb") as file:
            start = file.read(8)
            length = record.get("header_bytes", int.from_bytes(start, "little") + 8)  # of GGUF
            header = start + file.read(min(length - 8, size))  # a damaged length can be anything
    except OSError:
        return False
    return hashlib.sha256(header).hexdigest() == str(record["header_sha256"])


def changed(ours: Record, there: Record) -> list[str]:
    """`differences` in what `ours` has."""
    return differences(ours, {key: there.get(key) for key in ours})


def differences(ours: Record, theirs: Record, path: str = "") -> list[str]:
    """Places in which two records differ, as "options.numa: 2 there, 1 now"."""
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
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class OutputLock:
    """Locks on bytes of OUTPUT/.ktconv/lock, held until `release` or the end of the process.

    POSIX record locks, because they work between machines on network file systems. They
    belong to a process and vanish when it closes any descriptor of the file, so each file
    is opened once per process and the class records the locks of the process.

    Units are locked, and the state directory is removed, only under the `setup_lock`; so no lock
    refers to a directory that was removed.
    """

    _guard = threading.Lock()
    _files: ClassVar[dict[Path, tuple[int, set[int]]]] = {}  # path -> descriptor, held bytes

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._path = Path(os.path.realpath(journal.directory)) / "lock"
        self._mine: set[int] = set()

    @contextmanager
    def setup_lock(self, notify: Notify = silent, patience: float | None = None) -> Iterator[None]:
        """One run at a time begins or finishes; others wait. Creates the state directory.

        `notify` gets one sentence if that takes a while. OutputError after `patience` seconds.
        """
        self._wait_for_setup_lock(notify, SETUP_LOCK_TIMEOUT if patience is None else patience)
        try:
            yield
        finally:
            self._give_back({SETUP_BYTE})

    def _wait_for_setup_lock(self, notify: Notify, patience: float) -> None:
        started, noticed = time.monotonic(), False
        while not self._try_setup_lock():
            waited = time.monotonic() - started
            if waited > patience:
                raise OutputError(
                    f"timed out waiting for another ktconv{self._who()} to start or finish in "
                    f"{self._journal.output}",
                    "end that process if it hangs, then run the same command again",
                )
            if waited > SETUP_NOTICE_SECONDS and not noticed:
                noticed = True
                notify(
                    f"waiting for another ktconv{self._who()} to start or finish in "
                    f"{self._journal.output}"
                )
            time.sleep(SETUP_POLL_SECONDS)

    def _who(self) -> str:
        """ " (process 4711)" where another process of this machine has the setup lock."""
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, SETUP_BYTE, 1, 0)
        answer = question
        with self._guard, contextlib.suppress(OSError):
            fd, _ = self._open()
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, question)
            self._forget_if_unused()
        process = struct.unpack(_FLOCK, answer)[-1]  # as it was asked, 0, if there is none
        return f" (process {process})" if process > 0 else ""

    def acquire(self, units: Iterable[int], what: str) -> None:
        """Lock these bytes, all or none. InUseError if another run has one of them, and keeps it:
        one that was killed lets go when the system has ended all of its threads."""
        wanted, given_up = set(units), time.monotonic() + ENDING_SECONDS
        while not self.try_acquire(wanted):
            if time.monotonic() < given_up:
                time.sleep(SETUP_POLL_SECONDS)
                continue
            raise InUseError(
                f"another ktconv is converting {what} into {self._journal.output}",
                "wait until it has ended, then run the same command again",
            )

    def try_acquire(self, units: Iterable[int]) -> bool:
        """Lock these bytes, all or none; locks of this object do not count."""
        return self._try(set(units) - self._mine)

    def release(self) -> None:
        """Release all locks of this object."""
        self._give_back(self._mine)

    def _try_setup_lock(self) -> bool:
        self._journal.create()
        try:
            return self._try({SETUP_BYTE})
        except FileNotFoundError:
            return False  # a run that finished has just removed the directory

    def _try(self, wanted: set[int]) -> bool:
        with self._guard, _lock_errors(self._path):
            fd, held = self._open()
            taken = not wanted & held and _lock_bytes(fd, wanted)
            if taken and not _is_open_file(fd, self._path):  # removed by a run that finished
                _unlock_bytes(fd, wanted)
                taken = False
            if taken:
                held |= wanted
                self._mine |= wanted
            self._forget_if_unused()
            return taken

    def _give_back(self, units: set[int]) -> None:
        with self._guard:
            units = units & self._mine
            if not units or self._path not in self._files:
                return
            fd, held = self._files[self._path]
            _unlock_bytes(fd, units)
            held -= units
            self._mine -= units
            self._forget_if_unused()

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


@contextmanager
def _lock_errors(path: Path) -> Iterator[None]:
    """OSErrors in words, but for the missing directory that `setup_lock` handles."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise io_error("lock", path, error) from error


def _is_open_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock_bytes(fd: int, wanted: set[int]) -> bool:
    """Lock all of these bytes or none, without waiting."""
    taken: set[int] = set()
    for unit in sorted(wanted):
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, unit)
        except OSError as error:
            _unlock_bytes(fd, taken)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        taken.add(unit)
    return True


def _unlock_bytes(fd: int, units: Iterable[int]) -> None:
    """Unlock units in ascending order, so that the setup lock goes last: who gets it finds the
    units free."""
    for unit in sorted(units):
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, unit)
