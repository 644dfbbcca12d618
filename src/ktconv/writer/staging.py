"""Staged files of a unit: written under temporary names, then renamed together.

Staged files live in OUTPUT/.ktconv under names that no loader looks at. `commit` makes
them durable and final; until then nothing under a final name changes. Where one process writes
and another makes final, the first one seals, the second one publishes; several attempts at the
same unit have an `attempt` each in the names of their staged files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from ktconv.native import Mapped, map_file
from ktconv.system.files import (
    allocate,
    io_error,
    make_directory,
    opened_fd,
    read_exactly,
    remove,
    sync,
    translated,
    write_all,
    write_behind,
)
from ktconv.writer.shards import Shard


class Staging(Protocol):
    """Staged tensors of a unit. Safe to use from several threads."""

    def write(self, name: str, data: memoryview, offset: int) -> None:
        """Put `data` `offset` bytes into tensor `name`."""

    def read(self, name: str, target: memoryview, offset: int) -> None:
        """Read back what was written."""

    def mapped(self, name: str, nbytes: int, offset: int) -> Mapped | None:
        """Map what was written, as the system has it now; None: it must be read."""

    def place(self, name: str) -> tuple[Path, int]:
        """File of a tensor, and where it begins there: what is written behind its end is written
        to the tensor that follows."""

    def commit(self) -> list[dict[str, object]]:
        """Make everything durable and final; the journal's record of each file."""

    def abandon(self) -> None:
        """Remove what was staged."""


def staged_name(name: str, attempt: str = "") -> str:
    """Name below the staging directory of a shard or folder that is not final yet."""
    return f"{name}.{attempt}.part" if attempt else f"{name}.part"


class ShardStaging:
    """One or more safetensors shards, pre-sized, each tensor written into its place. `slots`: names
    of parts of tensors, with the tensor and the first byte in it."""

    def __init__(
        self,
        shards: Sequence[Shard],
        staging: Path,
        output: Path,
        attempt: str = "",
        slots: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    ) -> None:
        self._shards, self._staging, self._output = shards, staging, output
        self._attempt = attempt
        self._fds: dict[Path, int] = {}
        self._places: dict[str, tuple[Path, int]] = {}  # where each tensor starts
        try:
            for shard in shards:
                self._open(shard)
        except BaseException:
            self.abandon()
            raise
        for name, (tensor, offset) in slots.items():
            path, start = self._places[tensor]
            self._places[name] = path, start + offset

    def _path(self, shard: Shard) -> Path:
        return self._staging / staged_name(shard.name, self._attempt)

    def files(self) -> list[Path]:
        """Staged files, below the staging directory."""
        return [Path(staged_name(shard.name, self._attempt)) for shard in self._shards]

    def _open(self, shard: Shard) -> None:
        path = self._path(shard)
        with translated("write", path):
            path.unlink(missing_ok=True)  # a killed run's; nothing is written through a link
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self._fds[path] = fd
            allocate(fd, shard.size)
            write_all(fd, memoryview(shard.header), 0)
        for name, offset in shard.offsets.items():
            self._places[name] = (path, offset)

    def write(self, name: str, data: memoryview, offset: int) -> None:
        path, start = self._places[name]
        try:
            write_behind(self._fds[path], data, start + offset)
        except OSError as error:
            raise io_error(f"write tensor {name} to", path, error) from error

    def read(self, name: str, target: memoryview, offset: int) -> None:
        path, start = self._places[name]
        try:
            read_exactly(self._fds[path], target, start + offset)
        except OSError as error:
            raise io_error(f"read tensor {name} back from", path, error) from error

    def mapped(self, name: str, nbytes: int, offset: int) -> Mapped | None:
        path, start = self._places[name]
        return map_file(self._fds[path], nbytes, start + offset)

    def place(self, name: str) -> tuple[Path, int]:
        return self._places[name]

    def seal(self) -> None:
        """Make what is staged durable; nothing more can be written."""
        for shard in self._shards:
            path = self._path(shard)
            with translated("write", path):
                os.fsync(self._fds[path])
                os.close(self._fds.pop(path))

    def commit(self) -> list[dict[str, object]]:
        self.seal()
        publish_shards(self._shards, self._staging, self._output, self._attempt)
        return [shard_record(shard) for shard in self._shards]

    def abandon(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        for shard in self._shards:
            remove(self._path(shard))


def publish_shards(shards: Sequence[Shard], staging: Path, output: Path, attempt: str = "") -> None:
    """Give sealed shards their final names."""
    for shard in shards:
        path = staging / staged_name(shard.name, attempt)
        with translated("rename", path):
            path.replace(output / shard.name)
    with translated("write", output):
        sync(output)


def shard_record(shard: Shard) -> dict[str, object]:
    """Record that identifies a finished shard."""
    length = {"header_bytes": len(shard.header)} if shard.name.endswith(".gguf") else {}
    return {
        "name": shard.name,
        "bytes": shard.size,
        **length,
        "header_sha256": hashlib.sha256(shard.header).hexdigest(),
    }


class FolderStaging:
    """A folder `_layer_L` with one `.kt` file per tensor, renamed as a whole."""

    def __init__(
        self,
        folder: str,
        files: Mapping[str, tuple[str, int]],
        staging: Path,
        output: Path,
        attempt: str = "",
    ) -> None:
        self._folder, self._files, self._output = folder, files, output
        self._staging, self._attempt = staging, attempt
        self._staged = staging / staged_name(folder, attempt)
        self.abandon()
        try:
            for directory in sorted({self._path(name).parent for name in files}):
                make_directory(directory)
        except BaseException:
            self.abandon()
            raise

    def _path(self, name: str) -> Path:
        return self._staged / self._files[name][0].split("/", 1)[1]

    def files(self) -> list[Path]:
        """Staged files, below the staging directory."""
        return [self._path(name).relative_to(self._staging) for name in self._files]

    def write(self, name: str, data: memoryview, offset: int) -> None:
        path = self._path(name)
        with translated("write", path), opened_fd(path, os.O_WRONLY | os.O_CREAT) as fd:
            write_behind(fd, data, offset)

    def read(self, name: str, target: memoryview, offset: int) -> None:
        path = self._path(name)
        with translated("read back", path), opened_fd(path, os.O_RDONLY) as fd:
            read_exactly(fd, target, offset)

    def mapped(self, name: str, nbytes: int, offset: int) -> Mapped | None:
        path = self._path(name)
        with translated("read back", path), opened_fd(path, os.O_RDONLY) as fd:
            return map_file(fd, nbytes, offset)

    def place(self, name: str) -> tuple[Path, int]:
        return self._path(name), 0

    def seal(self) -> None:
        """Make what is staged durable."""
        with translated("write", self._staged):
            for name in self._files:
                sync(self._path(name))
            for directory in sorted({self._path(name).parent for name in self._files}):
                sync(directory)
            sync(self._staged)

    def commit(self) -> list[dict[str, object]]:
        self.seal()
        publish_folder(self._folder, self._staging, self._output, self._attempt)
        return [{"name": path, "bytes": size} for path, size in self._files.values()]

    def abandon(self) -> None:
        remove(self._staged)
        remove(self._staging / f"{self._folder}.old.part")


def publish_folder(folder: str, staging: Path, output: Path, attempt: str = "") -> None:
    """Give a sealed folder its final name."""
    staged, final = staging / staged_name(folder, attempt), output / folder
    aside = staging / f"{folder}.old.part"
    remove(aside)
    with translated("rename", staged):
        if final.exists():  # damaged, or of a run that ended before its journal entry
            final.rename(aside)  # at once: nobody sees half a folder
        staged.rename(final)
        sync(output)
    remove(aside)
