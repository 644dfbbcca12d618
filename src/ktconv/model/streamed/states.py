"""Outputs of a layer for all windows, kept on disk between layers; and large scratch tensors.

    states-a.bin, states-b.bin   tensors of the current layer and of the next, in turn
    state.json                   which of them is current, what lies where in it, and the position

A run that is killed goes on from the last `States.commit`: files of the current layer are only
overwritten after the state file names the other one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ktconv.errors import CheckpointError, DiskFullError, KtconvError, ResourceError
from ktconv.system.arrays import Array
from ktconv.system.files import io_error, read_exactly, remove, translated, write_all, write_durably
from ktconv.system.machine import disk_free
from ktconv.system.regular_files import MissingFileError, read_small
from ktconv.system.text import Notify, silent
from ktconv.system.units import format_size
from ktconv.writer.journal import parse_record

_FORMAT = 1
STATE_FILE = "state.json"
_PIECE_BYTES = 16 << 20  # read at a time where checksums are checked
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
_ARRAY_KINDS = "biuf"  # numbers: nothing that NumPy would unpickle


class Resumed(NamedTuple):
    """Arguments of the last `States.commit` of an earlier run."""

    position: int
    more: Mapping[str, Any]
    arrays: Mapping[str, Array]


class _Damaged(Exception):
    """Reason why the state of an earlier run cannot be used."""


class States:
    """Outputs of the current layer, and those of the next that are being made.

    There is one for each of `windows` windows, and one per side (0: the source) where the sides
    differ: as long as only those of side 0 are put, they are those of all sides. Methods may be
    called by several threads, but for `commit` and `resume`. Raises ResourceError where the disk
    is full or fails.
    """

    def __init__(self, folder: Path, sides: int, windows: int) -> None:
        self._folder, self._sides, self._windows = folder, sides, windows
        self._slots: list[_Slot] = []
        try:
            for name in "ab":
                self._slots.append(_Slot(folder / f"states-{name}.bin"))
        except BaseException:
            self.close()
            raise
        self._current = 0  # position in _slots

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and keep them."""
        for slot in self._slots:
            slot.close()

    @property
    def split(self) -> bool:
        """Whether the sides have outputs of their own at the current layer."""
        return "1/0" in self._slots[self._current].entries

    def put(self, side: int, window: int, value: Any) -> None:
        """Store an output of the next layer: a tensor, a number, a string, None, or tuples, lists
        and dicts of these. Tensors are copied. Raises CheckpointError for anything else."""
        self._check(side, window)
        leaves: list[Array] = []
        form = _form(value, leaves)
        self._slots[1 - self._current].put(f"{side}/{window}", form, leaves)

    def get(self, side: int, window: int) -> Any:
        """A copy of an output of the current layer: contiguous tensors on the CPU, in the dtypes
        that they had."""
        self._check(side, window)
        slot = self._slots[self._current]
        return slot.get(f"{side if self.split else 0}/{window}")

    def commit(
        self,
        position: int,
        more: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Array] | None = None,
    ) -> None:
        """The next layer becomes the current one, and what `resume` returns after a kill, with
        `position`, `more` (JSON-ready) and `arrays` of numbers. Outputs of all windows must be
        there, of side 0 or of all sides."""
        current, following = self._slots[self._current], self._slots[1 - self._current]
        self._check_complete(following.entries)
        for name, array in (arrays or {}).items():
            leaves: list[Array] = []
            following.put(f"array/{name}", _array_form(array, leaves), leaves)
        following.sync()
        record = {
            "format": _FORMAT,
            "sides": self._sides,
            "windows": self._windows,
            "position": position,
            "slot": 1 - self._current,
            "entries": following.entries,
            "more": more or {},
        }
        text = json.dumps(record)
        whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "record": text}
        with _disk(self._folder, len(text)):
            write_durably(self._folder / STATE_FILE, json.dumps(whole).encode(), self._folder)
        self._current = 1 - self._current
        current.clear()

    def resume(self, notify: Notify = silent) -> Resumed | None:
        """Take up what the last `commit` of a killed run left; None where there is nothing, or
        only something damaged, of which `notify` gets a sentence. Before the first `put`."""
        try:
            return self._resume()
        except MissingFileError:
            return None
        except (_Damaged, KtconvError) as error:
            notify(f"the state in {self._folder} cannot be used, starting again: {error}")
        except (AttributeError, LookupError, TypeError, ValueError):
            notify(f"the state in {self._folder} is damaged, starting again")
        for slot in self._slots:
            slot.clear()
        remove(self._folder / STATE_FILE)
        return None

    def _resume(self) -> Resumed:
        whole = parse_record(read_small(self._folder, STATE_FILE)) or {}
        text = whole["record"]
        if hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
            raise _Damaged(f"{STATE_FILE} has another checksum")
        record = json.loads(text)
        of_pass = [record[key] for key in ("format", "sides", "windows")]
        if of_pass != [_FORMAT, self._sides, self._windows]:
            raise _Damaged(f"{STATE_FILE} belongs to another pass")
        slot = self._slots[record["slot"]]
        slot.adopt(record["entries"])
        names = [name for name in slot.entries if name.startswith("array/")]
        arrays = {name.removeprefix("array/"): slot.get(name) for name in names}
        self._current = record["slot"]
        return Resumed(record["position"], record["more"], arrays)

    def _check(self, side: int, window: int) -> None:
        if not (0 <= side < self._sides and 0 <= window < self._windows):
            raise ValueError(f"there is no window {window} of side {side}")

    def _check_complete(self, entries: Mapping[str, Any]) -> None:
        there = {name for name in entries if not name.startswith("array/")}
        for sides in {1, self._sides}:
            if there == {f"{s}/{w}" for s in range(sides) for w in range(self._windows)}:
                return
        raise ValueError(f"of the outputs of a layer, only {sorted(there)} were put")


class _Slot:
    """A file of entries: name -> where its tensors lie, one behind the other, their checksum, and
    the `form` of the value that consists of them."""

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.used = 0
        self._path, self._lock = path, threading.Lock()
        self._fd = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with translated("open", path):
            self._fd = os.open(path, flags, 0o600)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def clear(self) -> None:
        """Forget all entries. Their bytes stay until others are written there."""
        self.entries, self.used = {}, 0

    def put(self, name: str, form: Any, leaves: Sequence[Array]) -> None:
        nbytes = sum(leaf.nbytes for leaf in leaves)
        with self._lock:
            earlier = self.entries.get(name)
            if earlier is not None and earlier["bytes"] == nbytes:
                at = earlier["at"]
            else:
                at, self.used = self.used, self.used + nbytes
        checksum, offset = 0, at
        with _disk(self._path.parent, nbytes):
            for leaf in leaves:
                write_all(self._fd, leaf.data, offset)
                checksum, offset = zlib.crc32(leaf.data, checksum), offset + leaf.nbytes
        with self._lock:
            self.entries[name] = {"at": at, "bytes": nbytes, "crc32": checksum, "form": form}

    def get(self, name: str) -> Any:
        entry = self.entries[name]
        with translated("read", self._path):
            value, end = _value(entry["form"], self._fd, entry["at"])
        if end != entry["at"] + entry["bytes"]:
            raise ValueError(f"{name} has another size than its tensors")
        return value

    def sync(self) -> None:
        """Make the entries survive a power loss, and give back what lies behind them."""
        with _disk(self._path.parent, self.used):
            os.ftruncate(self._fd, self.used)
            os.fdatasync(self._fd)

    def adopt(self, entries: dict[str, dict[str, Any]]) -> None:
        """Take up entries of an earlier run. _Damaged where the file does not contain them."""
        buffer, size = memoryview(bytearray(_PIECE_BYTES)), self.size
        for name, entry in entries.items():
            at, end = entry["at"], entry["at"] + entry["bytes"]
            if not 0 <= at <= end <= size or _nbytes(entry["form"]) != entry["bytes"]:
                raise _Damaged(f"{self._path.name} is too short")
            checksum = 0
            with translated("read", self._path):
                for start in range(at, end, _PIECE_BYTES):
                    piece = buffer[: min(_PIECE_BYTES, end - start)]
                    read_exactly(self._fd, piece, start)
                    checksum = zlib.crc32(piece, checksum)
            if checksum != entry["crc32"]:
                raise _Damaged(f"{name} in {self._path.name} has another checksum")
            self.used = max(self.used, end)
        self.entries = entries


# ---- nested values as JSON and bytes ---------------------------------------------------


def _form(value: Any, leaves: list[Array]) -> Any:
    """JSON of a value, without the bytes of its tensors, which are appended to `leaves`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or value.is_sparse:
            raise CheckpointError(f"tensors of {value.dtype} cannot be kept between layers")
        flat = value.detach().cpu().contiguous().reshape(-1)
        leaves.append(flat.view(torch.uint8).numpy())
        return {"tensor": [dtype, list(value.shape)]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_form(one, leaves) for one in value]}
    if type(value) is dict and all(type(key) in (int, str) for key in value):
        return {"dict": [[key, _form(one, leaves)] for key, one in value.items()]}
    raise CheckpointError(f"what a layer gives to the next contains a {type(value).__name__}")


def _array_form(array: Array, leaves: list[Array]) -> Any:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"an array of {array.dtype} cannot be kept")
    leaves.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return {"array": [array.dtype.str, list(array.shape)]}


def _value(form: Any, fd: int, offset: int) -> tuple[Any, int]:
    """The value of a form, its tensors read from `offset` on, and where they end."""
    if not isinstance(form, dict):
        return form, offset
    [(kind, content)] = form.items()
    if kind in ("tensor", "array"):
        flat = torch.empty(_nbytes(form), dtype=torch.uint8)
        read_exactly(fd, flat.numpy().data, offset)
        return _leaf(kind, content[0], content[1], flat), offset + flat.nbytes
    values, keyed = [], kind == "dict"
    for one in content:
        value, offset = _value(one[1] if keyed else one, fd, offset)
        values.append(value)
    if keyed:
        return dict(zip((key for key, _ in content), values, strict=True)), offset
    return tuple(values) if kind == "tuple" else values, offset


def _leaf(kind: str, dtype: str, shape: list[int], flat: Tensor) -> Any:
    if kind == "array":
        return flat.numpy().view(np.dtype(dtype)).reshape(shape)
    return flat.view(_DTYPES[dtype]).reshape(shape)


def _nbytes(form: Any) -> int:
    """Bytes of all tensors in a form. Raises ValueError, TypeError or LookupError for what is
    none."""
    if not isinstance(form, dict):
        return 0
    [(kind, content)] = form.items()
    if kind == "tensor":
        return _array_bytes(content[1], _DTYPES[content[0]].itemsize)
    if kind == "array":
        dtype = np.dtype(content[0])
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"{dtype} is no dtype of numbers")
        return _array_bytes(content[1], dtype.itemsize)
    if kind not in ("tuple", "list", "dict"):
        raise ValueError(f"{kind} is no kind of value")
    return sum(_nbytes(one[1] if kind == "dict" else one) for one in content)


def _array_bytes(shape: list[Any], itemsize: int) -> int:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    nbytes: int = prod(shape) * itemsize
    return nbytes


@contextmanager
def _disk(folder: Path, needed: int) -> Iterator[None]:
    """A full disk in words; `needed` bytes were being written."""
    try:
        yield
    except (OSError, DiskFullError) as error:
        full = error if isinstance(error, ResourceError) else io_error("write to", folder, error)
        if not isinstance(full, DiskFullError):
            raise full from error
        with contextlib.suppress(OSError):
            raise DiskFullError(
                f"{full}: {format_size(disk_free(folder))} are free and {format_size(needed)} "
                "more are needed",
                "use --work-dir DIR on a larger disk, or free some space and run the same command "
                "again",
            ) from error
        raise full from error


# ---- scratch ---------------------------------------------------------------------------


class Scratch:
    """Tensors for a while: in memory as long as a budget lasts, else in a file without a name.

    The file is in `folder` and vanishes with the process. A tensor stays valid as long as it is
    referred to. Pages of the file that are in memory are written and given back by the system where
    memory is short; `trim` lets go of them before that.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._left = budget
        self._fd, self._end = -1, 0
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file_bytes(self) -> int:
        """Bytes of the file now."""
        return self._end

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of any content; zeros if it is in the file. ResourceError if the disk is
        full."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes <= self._left:
            self._left -= nbytes
            return torch.empty(tuple(shape), dtype=dtype)
        self.trim()
        mapped = self._map(nbytes)
        self._maps.add(mapped)
        return torch.frombuffer(mapped, dtype=dtype, count=prod(shape)).reshape(tuple(shape))

    def trim(self) -> None:
        """Take all pages of the file out of this process; their content stays."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)  # of a shared mapping: nothing is lost

    def clear(self) -> None:
        """All tensors so far are no longer needed: their bytes are available again, those in the
        file as soon as nothing refers to the tensors."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._end, self._left = -1, 0, self._budget

    close = clear

    def _map(self, nbytes: int) -> mmap.mmap:
        page = mmap.ALLOCATIONGRANULARITY
        size = -(-nbytes // page) * page
        with _disk(self._folder, size):
            if self._fd < 0:
                self._fd = _nameless(self._folder)
            # Writing to a mapped page for which there is no room would be a SIGBUS.
            _allocate(self._fd, self._end, size)
            mapped = mmap.mmap(self._fd, size, offset=self._end)
        self._end += size
        return mapped


def _nameless(folder: Path) -> int:
    fd, name = tempfile.mkstemp(prefix="scratch-", dir=folder)
    Path(name).unlink()
    return fd


def _allocate(fd: int, offset: int, size: int) -> None:
    """Make sure that there is room for these bytes, which become zeros."""
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        zeros = memoryview(bytes(min(size, _PIECE_BYTES)))
        for start in range(0, size, len(zeros)):
            write_all(fd, zeros[: size - start], offset + start)
