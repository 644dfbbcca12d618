"""What tests of remote sources share."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from helpers.cli import check_reader, contents, done, start
from helpers.faults import Fault
from helpers.stores import FolderStore, close_stores

from ktconv.source.remote import attempts, mirror
from ktconv.source.remote.urls import Url


class Served:
    """Folders that are read as hf://org/NAME, and the stores that serve them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores: dict[str, FolderStore] = {}
        self.prepare = lambda store: None  # for each store that is opened

    def open(self, url: Url) -> FolderStore:
        store = FolderStore(self.root / url.place.rpartition("/")[2])
        self.prepare(store)
        self.stores[url.place] = store
        return store


class Server(Protocol):
    """A web server or hub of this machine."""

    fault: Callable[[int], Fault | None]


def weights(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(output.glob("*.safetensors"))}


def killed(server: Server, at: int, url: str, output: Path, clean: Path, *more: object) -> None:
    """A conversion that is killed while request `at` is answered: what it leaves is whole, and of
    what `clean` has."""
    ready = threading.Event()

    def kill(number: int) -> Fault | None:
        if number < at:
            return None
        assert ready.wait(60)
        os.kill(process.pid, signal.SIGKILL)
        return Fault("reset")

    server.fault = kill
    process = start(url, output, *more)
    ready.set()
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    expected = contents(clean)
    del expected["ktconv.json"], expected["README.md"]  # name the source
    check_reader(output, expected)
    server.fault = lambda _: None


@pytest.fixture(scope="module")
def local(model: Path) -> Path:
    """The conversion of the module's model, read from its files."""
    done(model, model.parent / "local")
    return model.parent / "local"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are tried again at once."""
    monkeypatch.setattr(attempts, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(attempts, "LONGEST_PAUSE", 0.0)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """tmp_path / NAME is hf://org/NAME."""
    found = Served(tmp_path)
    monkeypatch.setattr(mirror, "open_store", found.open)
    yield found
    close_stores()
