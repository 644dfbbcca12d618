"""Files that are made while they are read: what the stores of such files have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ktconv.system.opened import Opened, State
from ktconv.system.stores import FileStore, Span


class MadeFiles(FileStore):
    """A store of made files, of which nothing is kept or confirmed."""

    def kept(self, spans: Iterable[Span]) -> int:
        return sum(span.nbytes for span in spans)

    def confirm(self) -> None:
        pass


class MadeFile(Opened):
    """An open made file of `nbytes`; `fill(target, offset)` makes bytes from `offset` on."""

    def __init__(self, path: Path, nbytes: int, fill: Callable[[memoryview, int], None]) -> None:
        self.path, self._nbytes, self._fill = path, nbytes, fill

    @property
    def state(self) -> State:
        return State(self._nbytes, None, None)

    def read(self, target: memoryview, offset: int) -> None:
        self._fill(target.cast("B"), offset)

    def close(self) -> None:
        pass
