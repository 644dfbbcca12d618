"""Files that are made while they are read: what the stores of such files have in common."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct, field

from ktconv.system.opened import ServedFile, State
from ktconv.system.stores import FileStore, MadePath

M = TypeVar("M")


class Contents(Struct, Generic[M]):
    """The tensors of a made file, in order; not as TensorRefs (see source.types)."""

    path: Path  # of the source
    starts: list[int] = field(default_factory=list)
    made: list[M] = field(default_factory=list)
    nbytes: int = 0

    def add(self, one: M, nbytes: int) -> None:
        """Append a tensor, which begins at `self.nbytes`."""
        self.starts.append(self.nbytes)
        self.made.append(one)
        self.nbytes += nbytes

    def within(self, offset: int, nbytes: int) -> Iterator[tuple[M, int, int]]:
        """The tensors that bytes from `offset` on are of, with the first byte and how many of
        each."""
        at, done = bisect_right(self.starts, offset) - 1, 0
        while done < nbytes:
            start = offset + done - self.starts[at]
            end = self.starts[at + 1] if at + 1 < len(self.starts) else self.nbytes
            size = min(end - self.starts[at] - start, nbytes - done)
            yield self.made[at], start, size
            done, at = done + size, at + 1


class MadeFiles(FileStore, Generic[M]):
    """A store of made files, of which nothing is kept or confirmed. Their names in messages are
    those of the source's files `with_` something."""

    def __init__(self, with_: str) -> None:
        self._with = with_
        self._files: dict[Path, Contents[M]] = {}
        self._paths: dict[Path, MadePath] = {}

    def place(self, file: Path) -> tuple[MadePath, Contents[M]]:
        """The made file of a file of the source."""
        path = self._paths.get(file)
        if path is None:
            path = self._paths[file] = MadePath(file, f"{file} with {self._with}", self)
            self._files[path] = Contents(file)
        return path, self._files[path]

    def open(self, path: Path) -> ServedFile:
        own = self._files[path]
        return ServedFile(path, State(own.nbytes, None, None), partial(self.read, own))

    @abstractmethod
    def read(self, own: Contents[M], target: memoryview, offset: int) -> None:
        """Fill `target` with bytes of a made file."""
