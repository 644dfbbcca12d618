"""The read-ahead: the right bytes, each fetched once, in bounded memory, whatever the order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from ktconv.source.remote import ahead
from ktconv.source.remote.ahead import ReadAhead

pytestmark = [pytest.mark.slow, pytest.mark.network]

FILES = {name: random.Random(name).randbytes(100_000) for name in ("a", "b")}


class Server:
    """Records what is fetched; `gate` holds all requests back."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail: Callable[[str, int], bool] = lambda *_: False

    def fetch(self, name: str, start: int, stop: int) -> bytes:
        self.asked.append((name, start, stop))
        assert self.gate.wait(60)
        if self.fail(name, start):
            raise OSError("reset")
        return FILES[name][start:stop]


def read(reader: ReadAhead, name: str, start: int, stop: int) -> bytes:
    target = bytearray(stop - start)
    reader.read(name, memoryview(target), start)
    return bytes(target)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "PIECE_BYTES", 1000)
    monkeypatch.setattr(ahead, "GAP_BYTES", 10)


def test_announced_bytes_are_fetched_once_in_whole_pieces() -> None:
    server = Server()
    reader = ReadAhead(server.fetch, room=100_000, threads=1)
    spans = [("a", start, start + 300) for start in range(0, 6000, 300)]
    reader.want(spans)
    for name, start, stop in spans:
        assert read(reader, name, start, stop) == FILES[name][start:stop]
    assert sorted(server.asked) == [("a", at, at + 1000) for at in range(0, 6000, 1000)]


def test_neighbours_are_joined_over_small_gaps_only() -> None:
    server = Server()
    reader = ReadAhead(server.fetch, threads=1)
    reader.want([("a", 0, 100), ("a", 110, 200), ("a", 211, 300), ("b", 0, 50), ("a", 305, 400)])
    for name, start, stop in [("a", 0, 100), ("a", 110, 200), ("a", 211, 400), ("b", 0, 50)]:
        assert read(reader, name, start, stop) == FILES[name][start:stop]
    assert sorted(server.asked) == [("a", 0, 200), ("a", 211, 400), ("b", 0, 50)]


def test_memory_is_bounded_and_nothing_waits_for_ever() -> None:
    """Pieces that were announced and are never read make way for those that are."""
    server = Server()
    reader = ReadAhead(server.fetch, room=3000, threads=2)
    reader.want([("a", 0, 50_000)])
    for start in range(20_000, 50_000, 500):
        assert read(reader, "a", start, start + 500) == FILES["a"][start : start + 500]
        assert reader._held <= 3000 + 2 * 1000  # one piece of a reader, one in flight
    assert len(server.asked) < 60


def test_what_nobody_announced_is_exact_and_kept() -> None:
    server = Server()
    reader = ReadAhead(server.fetch)
    for _ in range(3):
        assert read(reader, "a", 77, 99) == FILES["a"][77:99]
    assert read(reader, "a", 70, 120) == FILES["a"][70:120]
    assert server.asked == [("a", 77, 99), ("a", 70, 77), ("a", 99, 120)]


def test_an_error_reaches_its_readers_and_is_not_kept() -> None:
    server = Server()
    server.fail = lambda name, start: name == "a"
    reader = ReadAhead(server.fetch)
    reader.want([("a", 0, 2000), ("b", 0, 100)])
    assert read(reader, "b", 0, 100) == FILES["b"][:100]
    with pytest.raises(OSError, match="reset"):
        read(reader, "a", 0, 2000)
    while reader._workers:  # a fetch that is under way may still fail
        time.sleep(0.01)
    server.fail = lambda *_: False
    assert read(reader, "a", 0, 2000) == FILES["a"][:2000]


def test_a_reader_that_fails_leaves_no_piece_that_nobody_fetches() -> None:
    """A read of many pieces, of which the first fails, and another read of the last ones."""
    server = Server()
    server.fail = lambda _, start: start == 0
    reader = ReadAhead(server.fetch)
    with pytest.raises(OSError, match="reset"):
        read(reader, "a", 0, 5000)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read(reader, "a", 1000, 5000)))
    thread.daemon = True
    thread.start()
    thread.join(60)
    assert found == [FILES["a"][1000:5000]]


def test_a_reader_does_not_wait_for_room() -> None:
    """Room for one piece, which another reader does not read yet."""
    server = Server()
    reader = ReadAhead(server.fetch, room=1000, threads=1)
    reader.want([("a", 0, 1000), ("b", 0, 1000)])
    assert read(reader, "b", 0, 1000) == FILES["b"][:1000]
    assert read(reader, "a", 0, 1000) == FILES["a"][:1000]


def test_readers_of_one_piece_share_a_request() -> None:
    server = Server()
    server.gate.clear()
    reader = ReadAhead(server.fetch, threads=1)
    reader.want([("a", 0, 1000)])
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(read(reader, "a", 0, 900))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    server.gate.set()
    for thread in threads:
        thread.join(60)
    assert found == [FILES["a"][:900]] * 4 and server.asked == [("a", 0, 1000)]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_by_any_threads_gives_the_right_bytes(seed: int) -> None:
    choose = random.Random(seed)
    server = Server()
    failing = {choose.randrange(100_000) for _ in range(5)}
    server.fail = lambda _, start: start in failing and not failing.discard(start)
    reader = ReadAhead(server.fetch, room=choose.choice((1000, 5000, 200_000)), threads=3)
    jobs = []
    for _ in range(200):
        name, start = choose.choice("ab"), choose.randrange(99_000)
        jobs.append((name, start, start + choose.randrange(1, 3500)))
    jobs = [(name, start, min(stop, 100_000)) for name, start, stop in jobs]
    wrong: list[object] = []

    def work(mine: list[tuple[str, int, int]]) -> None:
        for name, start, stop in mine:
            try:
                if read(reader, name, start, stop) != FILES[name][start:stop]:
                    wrong.append((name, start, stop))
            except OSError:
                if read(reader, name, start, stop) != FILES[name][start:stop]:
                    wrong.append((name, start, stop))

    reader.want(choose.sample(jobs, 100))
    threads = [threading.Thread(target=work, args=(jobs[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    reader.want(choose.sample(jobs, 100))
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
