"""What a power loss may leave of the calls in the shim's log.

POSIX promises of a file what an fsync of it came after, and of a name what an fsync of its
directory came after, nothing else. So each page that was written since may have its old or its new
content, and each change of a name may have happened or not. File systems keep more than that, each
of its own: who survives this survives them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

PAGE = 4096
_HEAD = struct.Struct("=c3xHHQQQ")
Mode = Literal["nothing", "everything", "prefix", "anything"]
MODES: tuple[Mode, ...] = ("nothing", "everything", "prefix", "anything")


@dataclass(frozen=True)
class Call:
    """A call that succeeded, or an fsync that failed (F)."""

    what: str
    inode: int
    offset: int
    length: int
    first: str
    second: str
    data: bytes


def read_log(path: Path) -> Iterator[Call]:
    """The shim's records; struct record of shim.c has the layout."""
    log, at = path.read_bytes(), 0
    while at < len(log):
        what, first, second, inode, offset, length = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        names = log[at : at + first].decode(), log[at + first : at + first + second].decode()
        at += first + second
        size = length if what == b"w" else 0
        yield Call(what.decode(), inode, offset, length, *names, log[at : at + size])
        at += size


@dataclass(eq=False)
class File:
    """Content in memory and on the disk; `lost` pages are not written by another fsync, because
    one of theirs has failed: Linux takes them for clean."""

    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    dirty: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        self.resize(max(end, len(self.now)))
        self.now[offset:end] = data
        self._touch(range(offset // PAGE, (end - 1) // PAGE + 1))

    def resize(self, size: int) -> None:
        before = len(self.now)
        if size < before:
            del self.now[size:]
            self.dirty = {page for page in self.dirty if page * PAGE < size}
        else:
            self.now.extend(bytes(size - before))
        if size != before:
            self._touch(range(min(size, before) // PAGE, max(size, before) // PAGE + 1))

    def _touch(self, pages: range) -> None:
        self.dirty.update(pages)
        self.lost.difference_update(pages)

    def sync(self) -> None:
        self.durable = self.after(lambda page: True, len(self.now))
        self.dirty.clear()

    def sync_failed(self) -> None:
        self.lost |= self.dirty
        self.dirty.clear()

    def after(self, kept: Callable[[int], bool], size: int) -> bytes:
        """Content with those of the new pages that `kept` says; never with lost ones."""
        found = bytearray(self.durable[:size].ljust(size, b"\0"))
        for page in sorted(self.dirty):
            start, end = page * PAGE, min((page + 1) * PAGE, size)
            if start < end and kept(page):
                found[start:end] = self.now[start:end].ljust(end - start, b"\0")
        return bytes(found)


@dataclass(eq=False)
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)


@dataclass(eq=False)
class Slot:
    """What a call did to one name, and whether an fsync of its directory came after."""

    folder: Folder
    name: str
    node: File | Folder | None
    durable: bool = False


class Disk:
    """A directory as programs see it, with what is still to be made durable."""

    def __init__(self, root: Path) -> None:
        """All that is there now is durable."""
        self._root, self._base = str(root.resolve()), Folder()
        self._nodes: dict[int, File | Folder] = {root.stat().st_ino: self._base}
        self._changes: list[list[Slot]] = []  # of each call that changes names
        self._start: list[Slot] = []
        self._add(self._base, root)

    def _add(self, folder: Folder, place: Path) -> None:
        for path in place.iterdir():
            node: File | Folder = Folder()
            if path.is_dir():
                assert isinstance(node, Folder)
                self._add(node, path)
            else:
                content = path.read_bytes()
                node = File(bytearray(content), content)
            self._nodes[path.stat().st_ino] = folder.names[path.name] = node
            self._start.append(Slot(folder, path.name, node, True))

    def apply(self, call: Call) -> None:
        node = self._nodes.get(call.inode)
        if call.what in "cm":
            node = self._nodes[call.inode] = File() if call.what == "c" else Folder()
            self._change((call.first, node))
        elif call.what == "r":
            self._change((call.first, None), (call.second, node))
        elif call.what == "l":
            self._change((call.second, node))
        elif call.what in "ud":
            self._change((call.first, None))
        elif call.what in "fF" and isinstance(node, Folder):
            if call.what == "f":
                self._sync_names(node)
        elif isinstance(node, File):
            self._change_file(node, call)
        else:
            raise AssertionError(f"{call.what} of a file that was never created")

    @staticmethod
    def _change_file(file: File, call: Call) -> None:
        if call.what == "w":
            file.write(call.offset, call.data)
        elif call.what == "t":
            file.resize(call.length)
        elif call.what == "s":  # posix_fallocate makes no file smaller
            file.resize(max(call.length, len(file.now)))
        elif call.what == "f":
            file.sync()
        elif call.what == "F":
            file.sync_failed()
        else:  # a shared mapping, whose writes nobody sees
            raise AssertionError(f"the log cannot have {call.what}")

    def _change(self, *changes: tuple[str, File | Folder | None]) -> None:
        slots = []
        for path, node in changes:
            folder, name = self._place(path)
            slots.append(Slot(folder, name, node))
            if node is None:
                folder.names.pop(name, None)
            else:
                folder.names[name] = node
        self._changes.append(slots)

    def _place(self, path: str) -> tuple[Folder, str]:
        *folders, name = PurePosixPath(path).relative_to(self._root).parts
        found = self._base
        for one in folders:
            below = found.names[one]
            assert isinstance(below, Folder)
            found = below
        return found, name

    def _sync_names(self, folder: Folder) -> None:
        for slots in self._changes:
            removed = any(slot.folder is folder and slot.node is None for slot in slots)
            for slot in slots:
                # No file system loses what it moved: where the old name is gone, the new one is.
                slot.durable |= slot.folder is folder or (removed and slot.node is not None)

    # ---- after the power is back ----

    def restore(self, target: Path, mode: Mode, rng: random.Random) -> None:
        """Writes what may be there into `target`, an empty directory. `prefix`: changes of names
        in their order up to one, as with a journal; `anything`: each for itself."""
        open_ones = [slots for slots in self._changes if not all(one.durable for one in slots)]
        upto = rng.randint(0, len(open_ones))
        tree: dict[int, dict[str, File | Folder | None]] = {}

        def put(slot: Slot) -> None:
            tree.setdefault(id(slot.folder), {})[slot.name] = slot.node

        for slot in self._start:
            put(slot)
        for slots in self._changes:
            for slot in slots:
                if slot.durable:
                    put(slot)
            if slots in open_ones:
                keep = {
                    "nothing": False,
                    "everything": True,
                    "prefix": open_ones.index(slots) < upto,
                    "anything": rng.random() < 0.5,
                }[mode]
                for slot in slots if keep else ():
                    put(slot)
        self._write(self._base, target, tree, mode, rng)

    def _write(
        self,
        folder: Folder,
        target: Path,
        tree: dict[int, dict[str, File | Folder | None]],
        mode: Mode,
        rng: random.Random,
    ) -> None:
        for name, node in sorted(tree.get(id(folder), {}).items()):
            if isinstance(node, Folder):
                (target / name).mkdir()
                self._write(node, target / name, tree, mode, rng)
            elif isinstance(node, File):
                (target / name).write_bytes(_content(node, mode, rng))


def _content(file: File, mode: Mode, rng: random.Random) -> bytes:
    if mode == "everything":
        return file.after(lambda page: True, len(file.now))
    if mode == "nothing":
        return file.durable
    size = rng.choice((len(file.now), len(file.durable)))
    return file.after(lambda page: rng.random() < 0.5, size)
