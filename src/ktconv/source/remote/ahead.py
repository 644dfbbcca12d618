"""Bytes of remote files, fetched in pieces before they are needed, in bounded memory.

What will be read is announced in order. Neighbours are joined and cut into pieces, which threads
fetch in that order while there is room. A reader that comes first fetches its piece itself, so
that nothing waits for room. Bytes that were read stay until their room is needed.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from msgspec import Struct, field

PIECE_BYTES = 16 << 20  # of one request: a pause of 50 ms between costs little at 1 GB/s
GAP_BYTES = 64 << 10  # between two spans, fetched with them: less than another request costs
AHEAD_BYTES = 384 << 20
THREADS = 8

Fetch = Callable[[str, int, int], bytes | bytearray]  # file, start, stop


class _Piece(Struct, eq=False):
    """Bytes [start, stop) of a file: to be fetched, being fetched, or there."""

    name: str
    start: int
    stop: int
    unread: int  # bytes that were announced and not read yet
    taken: bool = False  # somebody fetches it
    data: Future[bytes | bytearray] = field(default_factory=Future)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def spent(self) -> bool:
        """Whether nobody is known to need it again."""
        return self.unread <= 0 and self.data.done()


def requests_for(nbytes: int) -> int:
    """Estimated number of requests that `nbytes` bytes of one layer take."""
    return -(-nbytes // PIECE_BYTES)


class ReadAhead:
    """Reads files through `fetch`. Safe to use from several threads."""

    def __init__(self, fetch: Fetch, room: int = AHEAD_BYTES, threads: int = THREADS) -> None:
        self._fetch, self._room, self._threads = fetch, room, threads
        self._changed = threading.Condition()
        self._pieces: dict[str, list[_Piece]] = {}  # of a file, by their starts, without overlaps
        self._order: deque[_Piece] = deque()  # in the order in which they were announced
        self._waiting: deque[_Piece] = deque()  # not taken, with some that are
        self._held = 0  # bytes of pieces that are taken
        self._workers = 0

    def close(self) -> None:
        """Fetch nothing more ahead."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()

    # ---- what will be read ----

    def want(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """(file, start, stop) of what will be read, in this order."""
        with self._changed:
            for name, start, stop, wanted in _joined(spans):
                self._announce(name, start, stop, wanted)
            self._start_workers()
            self._changed.notify_all()

    def _announce(self, name: str, start: int, stop: int, wanted: int) -> None:
        """Only what no piece covers makes new ones. `wanted`: bytes that will be read of these,
        fewer than there are where gaps are between them, more where some are read twice."""
        share = wanted / (stop - start)
        for piece in self._overlapping(name, start, stop):
            if start < piece.start:
                self._add(name, start, piece.start, share)
            piece.unread += min(stop, piece.stop) - max(start, piece.start)
            start = max(start, piece.stop)
        if start < stop:
            self._add(name, start, stop, share)

    def _add(self, name: str, start: int, stop: int, share: float) -> None:
        for at in range(start, stop, PIECE_BYTES):
            end = min(at + PIECE_BYTES, stop)
            self._keep(piece := _Piece(name, at, end, int(share * (end - at))))
            self._waiting.append(piece)

    def _keep(self, piece: _Piece) -> None:
        insort(self._pieces.setdefault(piece.name, []), piece, key=lambda one: one.start)
        self._order.append(piece)

    def _overlapping(self, name: str, start: int, stop: int) -> list[_Piece]:
        pieces = self._pieces.get(name, [])
        first = bisect_right(pieces, start, key=lambda one: one.start) - 1
        found = []
        for piece in pieces[max(first, 0) :]:
            if piece.start >= stop:
                break
            if piece.stop > start:
                found.append(piece)
        return found

    # ---- fetching ----

    def _start_workers(self) -> None:
        for _ in range(min(self._threads, len(self._waiting)) - self._workers):
            threading.Thread(target=self._work, name="ktconv-fetch", daemon=True).start()
            self._workers += 1

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            self._load(piece)

    def _next(self) -> _Piece | None:
        """The next piece to fetch, when there is room; None: there is nothing left to do."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0].taken:
                    self._waiting.popleft()
                if not self._waiting:
                    self._workers -= 1
                    return None
                if self._make_room(self._waiting[0].nbytes):
                    piece = self._waiting.popleft()
                    self._take(piece)
                    return piece
                self._changed.wait()

    def _take(self, piece: _Piece) -> None:
        piece.taken = True
        self._held += piece.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Whether there is room for `nbytes` bytes, after dropping what nobody needs again."""
        if self._held and self._held + nbytes > self._room:
            self._drop(self._held + nbytes - self._room, lambda piece: piece.spent)
        return not self._held or self._held + nbytes <= self._room

    def _drop(self, nbytes: int, fits: Callable[[_Piece], bool]) -> None:
        """Forget pieces that are there and fit, the oldest first, until `nbytes` bytes are free."""
        kept: deque[_Piece] = deque()
        while self._order:
            piece = self._order.popleft()
            if nbytes > 0 and piece.taken and piece.data.done() and fits(piece):
                nbytes -= piece.nbytes
                self._forget(piece)
            else:
                kept.append(piece)
        self._order = kept

    def _forget(self, piece: _Piece) -> None:
        self._held -= piece.nbytes
        self._pieces[piece.name].remove(piece)

    def _load(self, piece: _Piece) -> None:
        """Fetch a piece that this thread has taken; who waits for it gets an error, too."""
        try:
            data = self._fetch(piece.name, piece.start, piece.stop)
        except BaseException as error:
            with self._changed:
                self._forget(piece)  # another reader tries again
                self._order.remove(piece)
                piece.data.set_exception(error)
                self._changed.notify_all()
            return
        with self._changed:
            piece.data.set_result(data)
            self._changed.notify_all()

    # ---- reading ----

    def read(self, name: str, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. Raises what `fetch` raises."""
        at, stop = offset, offset + len(target)
        while at < stop:
            piece, mine = self._at(name, at, stop)
            if mine:
                self._load(piece)
            data = piece.data.result()
            end = min(stop, piece.stop)
            target[at - offset : end - offset] = memoryview(data)[
                at - piece.start : end - piece.start
            ]
            with self._changed:
                piece.unread -= end - at
                if piece.spent:
                    self._changed.notify_all()
            at = end

    def _at(self, name: str, at: int, stop: int) -> tuple[_Piece, bool]:
        """The piece with the byte at `at`, and whether this thread must fetch it. One at a time:
        a thread that fails on one leaves no others that nobody fetches."""
        with self._changed:
            found = self._overlapping(name, at, stop)
            if not found or found[0].start > at:
                return self._unannounced(name, at, found[0].start if found else stop), True
            [piece, *_] = found
            mine = not piece.taken
            if mine:
                self._overtake(piece)
            return piece, mine

    def _overtake(self, piece: _Piece) -> None:
        """Take a piece that is needed now. If there is no room, those that were announced before
        it are not needed as they were thought to be."""
        excess = self._held + piece.nbytes - self._room
        if excess > 0:
            before = set()
            for one in self._order:
                if one is piece:
                    break
                before.add(one)
            self._drop(excess, lambda one: one.spent or one in before)
        self._take(piece)

    def _unannounced(self, name: str, start: int, stop: int) -> _Piece:
        """A piece for bytes that nobody announced, dropped as soon as its room is needed."""
        piece = _Piece(name, start, min(start + PIECE_BYTES, stop), 0)
        self._make_room(piece.nbytes)
        self._keep(piece)
        self._take(piece)
        return piece


def _joined(spans: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int, int]]:
    """(file, start, stop) with neighbours joined, in the order of their first parts, and the bytes
    that were asked for in each."""
    merged: list[list[int]] = []
    names: list[str] = []
    open_at: dict[str, int] = {}  # the last extent of each file
    for name, start, stop in spans:
        if stop <= start:
            continue
        index = open_at.get(name)
        if index is not None:
            extent = merged[index]
            if extent[0] - GAP_BYTES <= start <= extent[1] + GAP_BYTES:
                extent[:] = [min(extent[0], start), max(extent[1], stop), extent[2] + stop - start]
                continue
        open_at[name] = len(merged)
        names.append(name)
        merged.append([start, stop, stop - start])
    for name, (start, stop, wanted) in zip(names, merged, strict=True):
        yield name, start, stop, wanted
